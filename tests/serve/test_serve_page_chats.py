"""Chats on the server's page: kept, edited, with files and thoughts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.images import encoded, images_in, picture
from tests.kit.pages import ask
from tests.kit.serving import ServedModel, serving
from tests.kit.thoughts import QWEN3, scripted
from tests.kit.toy import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


def test_chats_are_kept_in_the_browser_until_they_are_deleted(
    page: "Page", url: str, model: ServedModel
) -> None:
    page.goto(url)
    marks = ask(page, "one").locator("[data-source]").count()
    page.get_by_role("button", name="New chat").click()
    ask(page, "two")
    page.reload()
    page.locator(".turn.user").get_by_text("two").wait_for()
    chats = page.get_by_role("navigation", name="Chats").get_by_role("listitem")
    page.locator("#chats summary").click()
    chats.nth(1).wait_for()
    assert [row.inner_text().split("\n")[0] for row in chats.all()] == ["two", "one"]
    page.get_by_role("button", name="one", exact=True).click()
    answer = page.locator(".turn.assistant")
    assert answer.locator(".said").inner_text() == "re: one" and marks > 0
    assert answer.locator("[data-source]").count() == marks
    assert "tokens/s" in answer.locator(".cost").inner_text()
    ask(page, "more")
    messages = [(message["role"], message["content"]) for message in model.calls[-1][0]]
    assert messages == [("user", "one"), ("assistant", "re: one"), ("user", "more")]
    page.locator("#chats summary").click()
    page.get_by_role("button", name="Delete “two”").click()
    chats.nth(1).wait_for(state="detached")
    page.get_by_role("button", name="Delete all chats").click()
    page.keyboard.press("Enter")  # the safe answer has the focus
    assert chats.count() == 1
    page.get_by_role("button", name="Delete all chats").click()
    page.get_by_role("button", name="Delete all", exact=True).click()
    page.locator("#hint").wait_for()
    assert page.evaluate("() => localStorage.length") == 0


def test_a_panel_that_was_opened_while_the_models_were_asked_for_stays_open(page: "Page", url: str) -> None:
    held: list[Route] = []

    def hold(route: "Route") -> None:
        held.append(route)

    page.route("**/v1/models", hold)
    with page.expect_request("**/v1/models"):
        page.goto(url)
    page.click("#chats summary")
    held[0].continue_()
    page.locator("#model").get_by_text("draft").wait_for()
    page.get_by_role("navigation", name="Chats").wait_for()


def test_what_is_no_chat_in_the_browser_is_left_out(page: "Page", url: str) -> None:
    """Other servers at this address may have left it."""
    question = {"role": "user", "text": "whole", "files": []}
    kept = {"a": [None], "b": [{**question, "text": 5}], "c": [{"role": "user", "text": "a"}], "d": "text"}
    kept |= {
        "e": [{**question, "files": [None]}],
        "f": [question, {"role": "assistant", "text": "b"}],
        "g": [question],
    }
    page.goto(url)
    for name, messages in kept.items():
        chat = json.dumps({"id": "another", "changed": 1, "messages": messages})
        page.evaluate("([name, chat]) => localStorage.setItem(`edgespec-chat-${name}`, chat)", [name, chat])
    page.evaluate("sessionStorage.setItem('edgespec-chat', 'a')")
    page.reload()
    page.click("#chats summary")
    page.locator("#kept li").first.wait_for()
    assert page.locator("#kept li").count() == 1
    page.click("#kept >> text=whole")
    assert page.inner_text(".user .said") == "whole"
    page.click("#chats summary")
    page.click("#kept >> text=Delete")
    page.locator("#kept li").first.wait_for(state="detached")


def test_a_chat_that_the_browser_has_no_room_for_goes_on_and_says_so(
    page: "Page", url: str, model: ServedModel
) -> None:
    fill = "n => { try { localStorage.setItem(`full${n}`, 'x'.repeat(n)) } catch {} }"
    page.goto(url)
    page.evaluate(f"() => {{ for (let n = 2 ** 23; n > 8; n >>= 1) ({fill})(n) }}")
    ask(page, "one")
    page.get_by_role("status").get_by_text("no room for this chat").wait_for()
    ask(page, "two")
    assert len(model.calls[-1][0]) == 3


def test_an_edited_message_cuts_off_what_follows_and_is_answered_anew(
    page: "Page", url: str, model: ServedModel
) -> None:
    page.goto(url)
    for text in ("one", "two", "three"):
        ask(page, text)
    edit = page.get_by_role("button", name="Edit")
    edit.nth(1).click()
    assert page.locator("#question").input_value() == "two"
    page.get_by_role("status").get_by_text("cuts off what follows").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#question").input_value() == "" and edit.count() == 3
    edit.nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("#question").fill("changed")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant").get_by_text("re: changed").wait_for()
    until(lambda: page.locator("#send").is_visible())
    texts = ["one", "re: one", "changed"]
    assert [message["content"] for message in model.calls[-1][0]] == texts
    assert page.locator(".turn .said").all_inner_texts() == [*texts, "re: changed"]
    page.reload()
    page.locator(".turn").nth(3).wait_for()
    assert page.locator(".turn .said").all_inner_texts() == [*texts, "re: changed"]


def test_texts_are_attached_with_their_tokens(
    page: "Page", url: str, model: ServedModel, tmp_path: Path
) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    (tmp_path / "a.md").write_bytes("```\nü\n```".encode())
    (tmp_path / "b.txt").write_bytes(b"gone")
    page.locator("#files").set_input_files([tmp_path / "a.md", tmp_path / "b.txt"])
    attached = page.get_by_role("list", name="Attached files").get_by_role("listitem")
    wanted = "a.md:\n````\n```\nü\n```\n````"
    attached.get_by_text(f"a.md, {len(wanted)} tokens").wait_for()
    page.get_by_role("button", name="Remove b.txt").click()
    _drop(page, "new File(['x'], 'c.txt')")
    attached.get_by_text("c.txt, ").wait_for()
    assert attached.count() == 2
    wanted += "\n\nc.txt:\n```\nx\n```\n\nWhat is it?"
    ask(page, "What is it?")
    assert model.calls[-1][0][-1]["content"] == wanted
    assert attached.count() == 0
    assert "a.md, " in page.locator(".turn.user .cost").inner_text()


def test_files_that_cannot_be_read_are_refused(page: "Page", url: str) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    for data, told in (
        ("new Uint8Array([255, 254])", "is no text in UTF-8"),
        ("'a\\0b'", "is no text in UTF-8"),
        ("'x'.repeat(700)", "has 714 tokens, and the model can read 640 more here"),
        ("new Uint8Array(3 * 2 ** 20 + 1)", "is too large: 3 MiB is the most"),
    ):
        _drop(page, f"new File([{data}], 'file')")
        page.get_by_role("status").get_by_text(f"file {told}").wait_for()
        page.locator("#status").evaluate("node => node.textContent = ''")
    assert page.locator("#attached li").count() == 0


def test_pictures_are_shown_sent_and_kept_if_they_are_small(page: "Page", url: str, tmp_path: Path) -> None:
    small, large = encoded(picture()), encoded(picture(450, 400))
    (tmp_path / "a.png").write_bytes(small)
    (tmp_path / "b.png").write_bytes(large)
    model = ServedModel(reads_images=True)
    with serving(model.as_model()) as seeing:
        page.goto(seeing)
        page.locator("#model").get_by_text("served").wait_for()
        page.locator("#files").set_input_files([tmp_path / "a.png", tmp_path / "b.png"])
        attached = page.get_by_role("list", name="Attached files").get_by_role("listitem")
        attached.get_by_text("a.png, 9 tokens").wait_for()
        attached.get_by_text("b.png, 9 tokens, too large to be kept with the chat").wait_for()
        _paste(page, f"new File([new Uint8Array({[*small]})], 'c.png', {{type: 'image/png'}})")
        attached.get_by_text("c.png, 9 tokens").wait_for()
        thumbnail = attached.get_by_role("img", name="a.png")
        assert thumbnail.evaluate("node => [node.naturalWidth, node.naturalHeight]") == [7, 5]
        ask(page, "Which?")
        images = images_in(model.calls[-1][0])
        assert [image.pixels.shape for image in images] == [(5, 7, 3), (400, 450, 3), (5, 7, 3)]
        question = page.locator(".turn.user")
        assert question.get_by_role("img").count() == 3 and "Which?" in question.inner_text()
        page.reload()
        question.get_by_text("too large to be kept").wait_for()
        assert question.get_by_role("img").count() == 2
        ask(page, "And now?")
        first = model.calls[-1][0][0]["content"]
        assert [part["type"] for part in first] == ["image", "image", "text"]
        assert first[-1]["text"] == "(The picture b.png is no longer here.)\n\nWhich?"
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    for data, told in (
        ("'a text'", "reads no images"),
        ("new Uint8Array(21 * 2 ** 20)", "20 MiB is the most"),
    ):
        _drop(page, f"new File([{data}], 'd.png', {{type: 'image/png'}})")
        page.get_by_role("status").get_by_text(told).wait_for()


def _paste(page: "Page", file: str) -> None:
    data = f"const data = new DataTransfer(); data.items.add({file});"
    page.evaluate(
        f"() => {{ {data} document.dispatchEvent(new ClipboardEvent('paste', {{clipboardData: data}})) }}"
    )


def _drop(page: "Page", file: str) -> None:
    carried = f"() => {{ const data = new DataTransfer(); data.items.add({file}); return data }}"
    page.dispatch_event("#log", "drop", {"dataTransfer": page.evaluate_handle(carried)})


def test_thoughts_are_folded_also_in_chats_that_are_kept(page: "Page") -> None:
    with scripted(QWEN3) as model, serving(model) as url:
        page.goto(url)
        for _ in range(2):
            turn = page.locator(".turn.assistant .said")
            if turn.count() == 0:
                ask(page, "hello")
            assert "Thoughts" in turn.inner_text() and not turn.locator("details p").is_visible()
            turn.locator("summary").click()
            assert turn.locator("details p").inner_text().strip() == "One and two. One and two."
            page.reload()
            page.locator(".turn.assistant").wait_for()
