"""What a person does at the server's page."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page


def enter(page: "Page", field: str, text: str) -> None:
    if field == "#question":
        page.locator("#model").get_by_text("draft").wait_for()  # the page knows the model
    page.locator(field).fill(text)
    page.keyboard.press("Enter")


def ask(page: "Page", text: str) -> Any:
    """Type and send; the answer when it is whole."""
    before = page.locator(".turn.assistant").count()
    enter(page, "#question", text)
    answer = page.locator(".turn.assistant").nth(before)
    answer.wait_for()
    page.locator("#log[aria-busy=false]").wait_for()  # costs also show how far the prompt is read
    return answer


def style(page: "Page", of: str, name: str) -> str:
    return str(page.locator(of).first.evaluate(f"node => getComputedStyle(node).{name}"))
