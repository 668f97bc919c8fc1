"""A loaded model with a history: the same output, fewer passes, nothing on disk that was not asked for."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import edgespec
from edgespec import History, LoadOptions
from edgespec_models.errors import RequestError
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA

PROMPT = "def add(a, b):"
OTHER_PROMPT = "x = 1"
OPTIONS = LoadOptions(threads=1)
NEW = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_native(tmp_path_factory.mktemp("models") / "target", LLAMA, "Q4_1").path


pytestmark = pytest.mark.usefixtures("free_passes")


def test_greedy_output_is_the_same_and_gets_faster_across_restarts(target: Path) -> None:
    def answers(model: edgespec.Model) -> tuple[edgespec.Generation, edgespec.Generation]:
        ask = partial(model.generate, PROMPT, max_new_tokens=NEW, stop_at_eos=False)
        return ask(), ask(temperature=0.9, seed=5)

    with edgespec.load(target, None, options=OPTIONS) as model:
        plain, sampled = answers(model)
    rounds = []
    for _ in range(3):
        with edgespec.load(target, "ngram", options=OPTIONS, history="me") as model:
            result, again = answers(model)
        assert (result.text, result.tokens) == (plain.text, plain.tokens)
        assert again.tokens == sampled.tokens
        assert result.stats.history_problem is None
        rounds.append(result.stats.rounds)
    assert rounds[2] < 0.5 * rounds[0]
    assert result.stats.by_source["history"].accepted > 20
    shown = History("me").show()
    assert "".join(text.text for text in shown) and {text.target for text in shown} == {"target"}


def test_without_a_history_nothing_is_written(target: Path, own_home: Path) -> None:
    with edgespec.load(target, "ngram", options=OPTIONS) as model:
        result = model.generate(PROMPT, max_new_tokens=20)
    assert "history" not in result.stats.by_source and not (own_home / "histories").exists()
    for drafter, history, says in ((None, "me", "uses no history"), ("ngram", Path(), "is a folder")):
        with pytest.raises(RequestError, match=says):
            edgespec.load(target, drafter, options=OPTIONS, history=history)


def test_plain_requests_neither_read_nor_teach(target: Path, own_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "notes.history"  # instead of a name
    with edgespec.load(target, "ngram", options=OPTIONS, history=file) as model:
        model.generate(PROMPT, max_new_tokens=20, speculate=False)
    assert History(file).show() == [] and not (own_home / "histories").exists()


def test_namespaces_and_targets_are_kept_apart(target: Path, tmp_path: Path) -> None:
    other = tiny_native(tmp_path / "other", LLAMA, "Q4_1").path  # the same tokenizer and weights
    for path, namespace in ((target, "mail"), (target, "code"), (other, "mail")):
        options = LoadOptions(threads=1, namespace=namespace)
        with edgespec.load(path, "ngram", options=options, history="me") as model:
            result = model.generate(PROMPT, max_new_tokens=20)
        assert result.stats.by_source.get("history", edgespec.SourceStats()).accepted == 0
    kept = History("me").namespaces()
    assert Counter(kept.keys()) == Counter([("target", "mail"), ("target", "code"), ("other", "mail")])


def test_a_stream_left_early_or_cancelled_teaches_what_was_read(target: Path) -> None:
    with edgespec.load(target, "ngram", options=OPTIONS, history="me") as model:
        stream = model.stream(PROMPT, max_new_tokens=NEW, stop_at_eos=False)
        for _ in stream:
            break
        del stream
        model.generate(OTHER_PROMPT, cancelled=lambda: True)
    assert sum(text.tokens for text in History("me").show()) >= 1
