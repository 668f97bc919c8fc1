"""The page: self-contained, escaped, complete, with bars as long as their values."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from edgespec.measuring.bench import BenchOptions, measure, summarize
from edgespec.measuring.prompts import Prompt
from edgespec.measuring.report import render_report
from edgespec_models.errors import RequestError
from tests.kit.fake_model import FakeModel


class Page(HTMLParser):
    """Checks that tags are balanced and gathers what would be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag != "meta":  # which has no end
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def result_of(model: FakeModel, categories: tuple[str, ...] = ("writing", "coding")) -> dict[str, Any]:
    prompts = [Prompt(f"p{i}", category, (category,)) for i, category in enumerate(categories)]
    options = BenchOptions(max_new_tokens=8)
    pairs = list(measure(model.as_model(), prompts, options))
    # As read back from a file.
    result: dict[str, Any] = json.loads(json.dumps(summarize(model.as_model(), pairs, options)))
    return result


def test_the_page_is_whole_and_fetches_nothing() -> None:
    text = render_report(result_of(FakeModel()))
    page = Page(text)
    assert page.open == [] and page.fetched == []
    assert "script" not in page.tags
    assert text.count('<table class="bars"') == 3
    assert "2.00 times as fast" in text and "2 of 2 answers are the same" in text
    assert "prefers-color-scheme: dark" in text
    assert "None" not in text and ">nan" not in text


def test_names_from_outside_are_escaped() -> None:
    text = render_report(result_of(FakeModel(name="<script>x</script>"), ("<b>bold</b>", "a&b")))
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;b&gt;bold" in text and "a&amp;b" in text


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (FakeModel(speed={"": 0.5}), ("0.50 times as fast as plain decoding (slower)", 'class="bar below"')),
        (FakeModel(flips=("writing",)), ("1 of 2 answers are the same", 'class="warning"')),
        (FakeModel(drafts=False), ("Few or no drafts in 2 answers: too &lt;slow&gt;",)),
        (FakeModel(rolled_back=("it <misled>",)), ("Rolled back in 2 answers: it &lt;misled&gt;",)),
    ],
)
def test_what_went_otherwise_is_told(model: FakeModel, told: tuple[str, ...]) -> None:
    text = render_report(result_of(model))
    assert all(each in text for each in told)
    assert ("Acceptance by position" in text) == model.drafts


def test_a_stopped_run_says_so_and_an_empty_one_renders() -> None:
    model = FakeModel(drafter_name=None, drafter_step_s=None)
    empty = summarize(model.as_model(), [], BenchOptions(), complete=False)
    text = render_report(empty)
    assert "stopped early" in text and "Nothing was measured" in text
    assert Page(text).open == []
    with pytest.raises(RequestError, match="format is None"):
        render_report({})


def test_bars_are_as_long_as_their_values() -> None:
    text = render_report(result_of(FakeModel(speed={"writing": 4.0, "coding": 1.0, "": 1.0})))
    speedups, costs, positions = re.findall(r'<table class="bars".*?</table>', text, re.DOTALL)
    widths = [re.findall(r"width: ([\d.]+)%", table) for table in (speedups, costs, positions)]
    # Of the costs: 100, 110, 130 and 200 ms.
    assert widths == [["100.0", "25.0", "40.0"], ["50.0", "55.0", "65.0", "100.0"], ["100.0", "0.0"]]
    assert speedups.count('style="left: 25.0%"') == 3
