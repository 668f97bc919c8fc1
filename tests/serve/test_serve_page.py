"""The server's page in a real browser: Chromium, as a person at the keyboard uses it.

Without a browser these tests are skipped and say so. Set EDGESPEC_BROWSER to a Chromium elsewhere.
"""

import json
import re
import threading
from collections.abc import Callable
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
from tests.kit.histories import learn
from tests.kit.models import Gated, toy_model
from tests.kit.pages import ask, enter, style
from tests.kit.serving import SOURCES, ServedModel, serving, serving_models, tokenizer
from tests.kit.toy import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
KEY = "a-key-of-this-test"
MARKDOWN = "see\n\n# Title\n\nSome **strong** `code`:\n\n```py\nx < 1\n```\n- one\n- two <b>not bold</b>"


def test_each_drafted_token_is_marked_with_its_source(page: "Page", url: str) -> None:
    page.goto(url)
    answer = ask(page, "the quick brown fox")
    assert answer.locator(".said").inner_text() == "re: the quick brown fox"
    marks = answer.locator("[data-source]")
    sources = [mark.get_attribute("data-source") for mark in marks.all()]
    assert sources[:3] == list(SOURCES[1:]) and "target" not in sources
    titles = {mark.get_attribute("title") for mark in marks.all()}
    assert titles == {"drafted by small", "drafted from this text", "drafted from what was learned"}
    kinds = {style(page, f".said [data-source={source}]", "textDecorationStyle") for source in SOURCES[1:]}
    assert len(kinds) == 3  # readable without colour
    legend = page.locator("#legend").inner_text()
    assert "by the target itself" in legend and "drafted by small" in legend
    assert "tokens/s" in answer.locator(".cost").inner_text()


def test_speed_stands_beside_plain_decodings(page: "Page", url: str, model: ServedModel) -> None:
    page.goto(url)
    page.locator("#plain").get_by_text("20.0 tokens/s").wait_for()
    ask(page, "hello")
    assert page.locator("#now").inner_text() == "20.0 tokens/s"
    page.locator("#settings summary").click()
    page.locator("#without").check()
    page.keyboard.press("Escape")
    assert "times plain" not in ask(page, "hello").locator(".cost").inner_text()
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
    page.locator("#log[aria-busy=false]").wait_for()  # until then the button stops the answer
    assert model.calls[0][0][-1]["content"] == "one\ntwo"
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
    assert reached[:6] == ["send", "anew", "SUMMARY", "marks", "theme", "SUMMARY"]
    page.locator("#marks").focus()
    page.keyboard.press("Space")
    assert page.locator("#marks").get_attribute("aria-pressed") == "false"
    assert style(page, ".said [data-source]", "textDecorationLine") == "none"


def test_escape_stops_an_answer_and_what_was_said_stays(page: "Page", url: str, model: ServedModel) -> None:
    model.pause_s = 0.05
    page.goto(url)
    enter(page, "#question", "x" * 500)
    page.locator(".turn.assistant [data-source]").first.wait_for()
    page.keyboard.press("Escape")
    page.locator(".cost").get_by_text("stopped").wait_for()
    until(lambda: model.cancelled == 1)
    model.pause_s = 0.0
    ask(page, "again")
    roles = [message["role"] for message in model.calls[-1][0]]
    assert roles == ["user", "assistant", "user"]
    page.locator("#anew").click()
    ask(page, "anew")
    assert [message["content"] for message in model.calls[-1][0]] == ["anew"]


def test_the_place_in_the_queue_and_the_reading_of_the_prompt_are_shown(page: "Page") -> None:
    gate = Gated()
    with toy_model(gate) as model, serving(model) as url, ThreadPoolExecutor(1) as pool:
        before = pool.submit(model.generate, "who comes first", max_new_tokens=1)
        assert gate.arrived.acquire(timeout=10)
        page.goto(url)
        enter(page, "#question", "a long question " * 4)
        cost = page.locator(".turn.assistant .cost")
        cost.get_by_text("waiting, 1 before it").wait_for()
        gate.let(len(gate.passes) + 3)
        cost.get_by_text(re.compile("reading the prompt, [0-9]+ of [0-9]+ tokens")).wait_for()
        gate.open()
        cost.get_by_text("first token after").wait_for()
        assert before.result().finish_reason == "length"


def test_the_load_of_a_model_is_shown(page: "Page", loads: Callable[[Any], None]) -> None:
    gate = threading.Event()

    def load(progress: ProgressCallback, **_: object) -> ServedModel:
        progress(LoadProgress("Exporting it", 1, 4))
        assert gate.wait(10)
        return ServedModel()

    loads(load)
    with Models({"served": "of no weights"}) as models, serving_models(models) as url:
        page.goto(url)
        enter(page, "#question", "hello")
        cost = page.locator(".turn.assistant .cost")
        cost.get_by_text("loading served, Exporting it 25 %").wait_for()
        gate.set()
        cost.get_by_text("first token after").wait_for()


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
        enter(page, "#question", "hello")
    assert json.loads(asked.value.post_data or "")["model"] == "other"
    until(lambda: choice.locator("option").all_inner_texts() == ["served", "other"])
    assert choice.input_value() == "other"


def test_the_end_stays_in_view_unless_the_reader_scrolls(page: "Page", url: str, model: ServedModel) -> None:
    log = page.locator("#log")
    left = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    down = page.get_by_role("button", name="Go to the end")
    page.set_viewport_size({"width": 600, "height": 420})
    page.goto(url)
    ask(page, "w\n\n" * 40)
    assert log.evaluate(left) < 8 and not down.is_visible()
    page.locator("#question").fill("one\ntwo\nthree\nfour")  # its box takes room from the conversation
    until(lambda: log.evaluate(left) < 8)
    model.pause_s = 0.02
    enter(page, "#question", "w\n\n" * 60)
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
    ask(page, "hello " * 20)
    until(
        lambda: page.evaluate("() => heard.filter(Boolean)") == ["The model writes.", "The answer has ended."]
    )
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    log = page.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-live") == "off"
    assert log.get_by_role("article", name="You").count() == 1
    assert log.get_by_role("article", name="served").count() == 1
    form = page.get_by_role("form", name="Ask")
    assert form.get_by_role("textbox", name="Your message").count() == 1
    assert form.get_by_role("button", name="Attach files").count() == 1
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
    enter(page, "#question", "some words and averyveryveryveryveryveryveryverylongone")
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
    said = ask(page, MARKDOWN).locator(".said")
    assert said.locator("h2").inner_text() == "Title"
    assert said.locator("strong").inner_text() == "strong"
    assert said.locator("p code").inner_text() == "code"
    assert said.locator("pre").inner_text() == "x < 1"
    assert said.locator("p.item").count() == 2 and said.locator("b").count() == 0
    assert "<b>not bold</b>" in said.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(page: "Page", url: str, scheme: Any) -> None:
    def dark() -> bool:
        colour = style(page, "body", "backgroundColor")
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
        enter(page, "#forget-text", "müller")
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
        enter(page, "#key-text", "wrong-key")
        enter(page, "#key-text", KEY)
        page.locator("#model").get_by_text("served").wait_for()
        assert ask(page, "hello").locator(".said").inner_text() == "re: hello"


def test_what_the_server_refuses_is_told(page: "Page", model: ServedModel, url: str) -> None:
    page.goto(url)
    page.locator("#model").get_by_text("served").wait_for()
    model.refusal = Busy("64 requests wait; ask again later")
    enter(page, "#question", "hello")
    page.locator(".turn.error").get_by_text("64 requests wait").wait_for()


def test_a_page_of_another_origin_reads_answers_and_errors_if_it_is_allowed(browser: "Browser") -> None:
    """A real browser hides from pages what has no CORS headers, and tells them of a network error instead."""
    asking = """async ([url, key]) => {
        const body = JSON.stringify({model: "served", messages: [{role: "user", content: "hi"}]});
        const headers = {"Content-Type": "application/json", Authorization: `Bearer ${key}`};
        try {
            const reply = await fetch(url, {method: "POST", headers, body});
            const json = await reply.json();
            return [reply.status, json.error ? json.error.code : json.choices[0].message.content];
        } catch (error) { return [0, error.name]; }
    }"""
    allowed = ServeOptions(port=0, api_key=KEY, allow_origins=("http://127.0.0.1:*",))
    null = ServeOptions(port=0, api_key=KEY, allow_origins=("null",))
    with serving(ServedModel().as_model()) as other, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{other}/health")  # which has no policy of its own
        page.set_content("<iframe sandbox=allow-scripts srcdoc=x></iframe>")  # its origin is null
        until(lambda: len(page.frames) == 2)
        for options, asks, reads in (
            (allowed, page.main_frame, True),
            (allowed, page.frames[1], False),
            (null, page.frames[1], True),
            (null, page.main_frame, False),
        ):
            with serving(ServedModel().as_model(), options) as url:
                told = [asks.evaluate(asking, [f"{url}/v1/chat/completions", key]) for key in (KEY, "x")]
            assert told == ([[200, "re: hi"], [401, "invalid_api_key"]] if reads else [[0, "TypeError"]] * 2)
