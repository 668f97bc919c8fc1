"""The server's page in a real browser: Chromium, as a person at the keyboard uses it.

Without a browser these tests are skipped and say so. Set EDGESPEC_BROWSER to a Chromium elsewhere.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgespec.history.manage import History
from edgespec.history.store import Scope
from edgespec.history.use import open_use
from edgespec.models import Models
from edgespec.serve.options import ServeOptions
from edgespec_models.errors import Busy
from edgespec_models.progress import Progress as LoadProgress
from edgespec_models.progress import ProgressCallback
from tests.histories_for_tests import learn
from tests.models_for_tests import Gated, toy_model
from tests.serving_for_tests import SOURCES, ServedModel, serving, serving_models, tokenizer, until
from tests.test_thinking import QWEN3, scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEY = "a-key-of-this-test"
MARKDOWN = "see\n\n# Title\n\nSome **strong** `code`:\n\n```py\nx < 1\n```\n- one\n- two <b>not bold</b>"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    path = os.environ.get("EDGESPEC_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("the page is not tested: there is no Chromium (apt-get install chromium)")
    missing = "the page is not tested: pip install 'edgespec[browser]'"
    # As root, as in containers, Chromium runs without its sandbox only; the pages are our own.
    arguments = ["--no-sandbox", "--disable-background-networking"]
    with pytest.importorskip("playwright.sync_api", reason=missing).sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A page whose faults and foreign requests fail the test."""
    context = browser.new_context(viewport={"width": 900, "height": 760})
    context.set_default_timeout(10_000)
    page = context.new_page()
    faults: list[str] = []
    urls: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    yield page
    context.close()
    assert faults == []
    assert all(url.startswith("http://127.0.0.1:") or url == "data:," for url in urls), urls


def _enter(page: "Page", field: str, text: str) -> None:
    if field == "#question":
        page.locator("#model").get_by_text("draft").wait_for()  # the page knows the model
    page.locator(field).fill(text)
    page.keyboard.press("Enter")


def _ask(page: "Page", text: str) -> Any:
    """Type and send; the answer when it is whole."""
    before = page.locator(".turn.assistant .cost:not(:empty)").count()
    _enter(page, "#question", text)
    page.locator(".turn.assistant .cost:not(:empty)").nth(before).wait_for()
    return page.locator(".turn.assistant").nth(before)


def test_each_drafted_token_is_marked_with_its_source(page: "Page", url: str) -> None:
    page.goto(url)
    answer = _ask(page, "the quick brown fox")
    assert answer.locator(".said").inner_text() == "re: the quick brown fox"
    marks = answer.locator("[data-source]")
    sources = [mark.get_attribute("data-source") for mark in marks.all()]
    assert sources[:3] == list(SOURCES[1:]) and "target" not in sources
    titles = {mark.get_attribute("title") for mark in marks.all()}
    assert titles == {"drafted by small", "drafted from this text", "drafted from what was learned"}
    kinds = {_style(page, f".said [data-source={one}]", "textDecorationStyle") for one in SOURCES[1:]}
    assert len(kinds) == 3  # readable without colour
    legend = page.locator("#legend").inner_text()
    assert "by the target itself" in legend and "drafted by small" in legend
    assert "tokens/s" in answer.locator(".cost").inner_text()


def _style(page: "Page", of: str, name: str) -> str:
    return str(page.locator(of).first.evaluate(f"node => getComputedStyle(node).{name}"))


def test_speed_stands_beside_plain_decodings(page: "Page", url: str, model: ServedModel) -> None:
    page.goto(url)
    page.locator("#plain").get_by_text("20.0 tokens/s").wait_for()
    _ask(page, "hello")
    assert page.locator("#now").inner_text() == "20.0 tokens/s"
    page.locator("#settings summary").click()
    page.locator("#without").check()
    page.keyboard.press("Escape")
    assert "times plain" not in _ask(page, "hello").locator(".cost").inner_text()
    assert model.calls[-1][1]["speculate"] is False
    assert "measured" in str(page.locator("#plain").get_attribute("title"))


def test_everything_is_reached_by_keyboard(page: "Page", url: str, model: ServedModel) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    page.keyboard.type("one")  # the message has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator(".cost:not(:empty)").wait_for()
    assert model.calls[0][0][-1]["content"] == "one\ntwo"
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
    assert reached[:6] == ["send", "anew", "SUMMARY", "marks", "theme", "SUMMARY"]
    page.locator("#marks").focus()
    page.keyboard.press("Space")
    assert page.locator("#marks").get_attribute("aria-pressed") == "false"
    assert _style(page, ".said [data-source]", "textDecorationLine") == "none"


def test_escape_stops_an_answer_and_what_was_said_stays(page: "Page", url: str, model: ServedModel) -> None:
    model.pause_s = 0.05
    page.goto(url)
    _enter(page, "#question", "x" * 500)
    page.locator(".turn.assistant [data-source]").first.wait_for()
    page.keyboard.press("Escape")
    page.locator(".cost").get_by_text("stopped").wait_for()
    until(lambda: model.cancelled == 1)
    model.pause_s = 0.0
    _ask(page, "again")
    roles = [message["role"] for message in model.calls[-1][0]]
    assert roles == ["user", "assistant", "user"]
    page.locator("#anew").click()
    _ask(page, "anew")
    assert [message["content"] for message in model.calls[-1][0]] == ["anew"]


def test_the_place_in_the_queue_and_the_reading_of_the_prompt_are_shown(page: "Page") -> None:
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url, ThreadPoolExecutor(1) as pool:
        before = pool.submit(model.generate, "who comes first", max_new_tokens=1)
        assert gate.arrived.acquire(timeout=10)
        page.goto(url)
        _enter(page, "#question", "a long question " * 4)
        cost = page.locator(".turn.assistant .cost")
        cost.get_by_text("waiting, 1 before it").wait_for()
        gate.let(len(gate.passes) + 3)
        cost.get_by_text(re.compile("reading the prompt, [0-9]+ of [0-9]+ tokens")).wait_for()
        gate.open()
        cost.get_by_text("first token after").wait_for()
        assert before.result().finish_reason == "length"


def test_the_load_of_a_model_is_shown(page: "Page", monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def load(progress: ProgressCallback, **_: object) -> ServedModel:
        progress(LoadProgress("Exporting it", 1, 4))
        assert gate.wait(10)
        return ServedModel()

    monkeypatch.setattr("edgespec.models.load", load)
    with Models({"served": "of no weights"}) as models, serving_models(models) as url:
        page.goto(url)
        _enter(page, "#question", "hello")
        cost = page.locator(".turn.assistant .cost")
        cost.get_by_text("loading served, Exporting it 25 %").wait_for()
        gate.set()
        cost.get_by_text("first token after").wait_for()


def test_chats_are_kept_in_the_browser_until_they_are_deleted(
    page: "Page", url: str, model: ServedModel
) -> None:
    page.goto(url)
    marks = _ask(page, "one").locator("[data-source]").count()
    page.get_by_role("button", name="New chat").click()
    _ask(page, "two")
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
    _ask(page, "more")
    said = [(message["role"], message["content"]) for message in model.calls[-1][0]]
    assert said == [("user", "one"), ("assistant", "re: one"), ("user", "more")]
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


def test_what_is_no_chat_in_the_browser_is_left_out(page: "Page", url: str) -> None:
    """Other servers at this address may have left it."""
    asked = {"role": "user", "text": "whole", "files": []}
    kept = {"a": [None], "b": [{**asked, "text": 5}], "c": [{"role": "user", "text": "a"}], "d": "text"}
    kept |= {
        "e": [{**asked, "files": [None]}],
        "f": [asked, {"role": "assistant", "text": "b"}],
        "g": [asked],
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
    _ask(page, "one")
    page.get_by_role("status").get_by_text("no room for this chat").wait_for()
    _ask(page, "two")
    assert len(model.calls[-1][0]) == 3


def test_an_edited_message_cuts_off_what_follows_and_is_answered_anew(
    page: "Page", url: str, model: ServedModel
) -> None:
    page.goto(url)
    for text in ("one", "two", "three"):
        _ask(page, text)
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
    asked = ["one", "re: one", "changed"]
    assert [message["content"] for message in model.calls[-1][0]] == asked
    assert page.locator(".turn .said").all_inner_texts() == [*asked, "re: changed"]
    page.reload()
    page.locator(".turn").nth(3).wait_for()
    assert page.locator(".turn .said").all_inner_texts() == [*asked, "re: changed"]


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
    _ask(page, "What is it?")
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


def _drop(page: "Page", file: str) -> None:
    carried = f"() => {{ const data = new DataTransfer(); data.items.add({file}); return data }}"
    page.dispatch_event("#log", "drop", {"dataTransfer": page.evaluate_handle(carried)})


def test_thoughts_are_folded_also_in_chats_that_are_kept(page: "Page") -> None:
    with scripted(QWEN3) as model, serving(model) as url:
        page.goto(url)
        for _ in range(2):
            said = page.locator(".turn.assistant .said")
            if said.count() == 0:
                _ask(page, "hello")
            assert "Thoughts" in said.inner_text() and not said.locator("details p").is_visible()
            said.locator("summary").click()
            assert said.locator("details p").inner_text().strip() == "One and two. One and two."
            page.reload()
            page.locator(".turn.assistant").wait_for()


def test_a_model_is_chosen_where_there_are_several(page: "Page", url: str) -> None:
    known = {"drafter": None, "history": None, "plain_tokens_per_second": 8.0, "context_length": 640}
    models = [
        {"id": "served", "loaded": True, "edgespec": known},
        {"id": "other", "loaded": False, "edgespec": None},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.goto(url)
    choice = page.get_by_role("combobox", name="Model")
    until(lambda: choice.locator("option").all_inner_texts() == ["served", "other (not loaded)"])
    assert page.locator("#plain").inner_text() == "8.0 tokens/s"
    choice.select_option("other")
    assert page.locator("#plain").inner_text() == "–"
    models[1] |= {"loaded": True, "edgespec": known}
    with page.expect_request("**/v1/chat/completions") as asked:
        _enter(page, "#question", "hello")
    assert json.loads(asked.value.post_data or "")["model"] == "other"
    until(lambda: choice.locator("option").all_inner_texts() == ["served", "other"])
    assert choice.input_value() == "other"


def test_the_end_stays_in_view_unless_the_reader_scrolls(page: "Page", url: str, model: ServedModel) -> None:
    log = page.locator("#log")
    left = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    down = page.get_by_role("button", name="Go to the end")
    page.set_viewport_size({"width": 600, "height": 420})
    page.goto(url)
    _ask(page, "w\n\n" * 40)
    assert log.evaluate(left) < 8 and not down.is_visible()
    page.locator("#question").fill("one\ntwo\nthree\nfour")  # its box takes room from the conversation
    until(lambda: log.evaluate(left) < 8)
    model.pause_s = 0.02
    _enter(page, "#question", "w\n\n" * 60)
    page.locator(".turn.assistant").nth(1).locator("p").nth(12).wait_for()
    assert log.evaluate(left) < 60  # a line or two may be new
    log.hover()
    page.mouse.wheel(0, -80)
    down.wait_for()
    place = log.evaluate("log => log.scrollTop")
    page.locator(".turn.assistant").nth(1).locator("p").nth(20).wait_for()
    assert log.evaluate("log => log.scrollTop") == place
    down.click()
    page.locator(".turn.assistant").nth(1).locator("p").nth(28).wait_for()
    assert log.evaluate(left) < 60 and not down.is_visible()


def test_a_screen_reader_is_told_what_there_is_and_hears_no_token(page: "Page", url: str) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    page.evaluate(
        """() => { window.heard = []; for (const node of document.querySelectorAll('[role=status]'))
        new MutationObserver(() => heard.push(node.textContent)).observe(node, {childList: true}) }"""
    )
    _ask(page, "hello " * 20)
    until(
        lambda: page.evaluate("() => heard.filter(Boolean)") == ["The model writes.", "The answer has ended."]
    )
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    log = page.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-live") == "off"
    assert log.get_by_role("article", name="You").count() == 1
    assert log.get_by_role("article", name="served").count() == 1
    ask = page.get_by_role("form", name="Ask")
    assert ask.get_by_role("textbox", name="Your message").count() == 1
    assert ask.get_by_role("button", name="Attach texts").count() == 1
    nameless = re.findall(r"- (?:button|textbox|combobox|link)(?=$|:)", page.locator("body").aria_snapshot())
    assert nameless == []


def test_a_narrow_window_has_room_for_all(page: "Page", url: str) -> None:
    known = {"drafter": "a-drafter-with-a-long-name", "history": "h", "context_length": 640}
    models = [
        {"id": f"{name}-model-with-quite-a-long-name", "edgespec": known} for name in ("one", "another")
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.set_viewport_size({"width": 380, "height": 700})
    page.goto(url)
    _enter(page, "#question", "some words and averyveryveryveryveryveryveryverylongone")
    page.locator(".turn.error").wait_for()
    shown = page.locator("button:visible, select:visible, textarea:visible, summary:visible, output:visible")
    boxes = [box for box in (each.bounding_box() for each in shown.all()) if box is not None]
    assert len(boxes) > 10 and min(box["x"] for box in boxes) >= 0
    assert max(box["x"] + box["width"] for box in boxes) <= 380
    for panel in ("#chats", "#settings"):
        page.locator(f"{panel} summary").click()
        box = page.locator(f"{panel} .panel").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 380 and box["y"] >= 0
    assert page.locator("#chats .panel").is_hidden()  # one at a time


def test_markdown_is_shown_as_it_should_look_and_never_as_html(page: "Page", url: str) -> None:
    page.goto(url)
    said = _ask(page, MARKDOWN).locator(".said")
    assert said.locator("h2").inner_text() == "Title"
    assert said.locator("strong").inner_text() == "strong"
    assert said.locator("p code").inner_text() == "code"
    assert said.locator("pre").inner_text() == "x < 1"
    assert said.locator("p.item").count() == 2 and said.locator("b").count() == 0
    assert "<b>not bold</b>" in said.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(page: "Page", url: str, scheme: Any) -> None:
    def dark() -> bool:
        colour = _style(page, "body", "backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128

    page.emulate_media(color_scheme=scheme)
    page.goto(url)
    assert dark() == (scheme == "dark")
    page.locator("#theme").click()
    assert dark() == (scheme == "light")


def test_what_was_learned_is_shown_and_forgotten(page: "Page", model: ServedModel, tmp_path: Path) -> None:
    history = History(tmp_path / "h.edgespec-history")
    use = open_use(history.path, Scope("served", tokenizer().digest, ""), tokenizer())
    for text in ("Dear Mrs. Müller, thank you for your letter", "the quick brown fox jumps over the dog"):
        learn(use, tokenizer().encode(text))
    use.close()
    with serving(model.as_model(), history=history) as url:
        page.goto(url)
        page.locator("#learned summary").click()
        page.locator("#passages pre").first.wait_for()
        before = page.locator("#passages pre").count()
        _enter(page, "#forget-text", "müller")
        page.locator("#status").get_by_text("One passage is forgotten.").wait_for()
        assert page.locator("#passages pre").count() == before - 1
        page.locator("#forget-all").click()
        page.keyboard.press("Enter")  # the safe answer has the focus
        assert history.path.exists()
        page.locator("#forget-all").click()
        page.get_by_role("button", name="Forget it").click()
        page.locator("#learned-summary").get_by_text("holds 0 passages").wait_for()
    assert not history.path.exists()
    assert History(history.path).size_bytes == 0


def test_a_server_with_a_key_has_the_page_ask_for_it(page: "Page", model: ServedModel) -> None:
    with serving(model.as_model(), ServeOptions(port=0, api_key=KEY)) as url:
        page.goto(url)
        _enter(page, "#key-text", "wrong-key")
        _enter(page, "#key-text", KEY)
        page.locator("#model").get_by_text("served").wait_for()
        assert _ask(page, "hello").locator(".said").inner_text() == "re: hello"


def test_what_the_server_refuses_is_told(page: "Page", model: ServedModel, url: str) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    model.refusal = Busy("64 requests wait; ask again later")
    _enter(page, "#question", "hello")
    page.locator(".turn.error").get_by_text("64 requests wait").wait_for()
