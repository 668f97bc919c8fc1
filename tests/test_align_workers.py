"""Answers of several workers at once: needs Ray, which the gate does without (extra ``ray``)."""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.align.answering import answer, answering_with_workers
from edgespec.align.answers import Asking, read_answers, write_answers
from edgespec.measuring.prompts import Prompt
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.errors import EdgespecError
from edgespec_models.progress import ignore_progress
from tests.gguf_for_tests import tiny_gguf

pytestmark = [
    # Not imported here: what keeps Ray on the loopback interface has to be said before it is.
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'ray', which the gate does without"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]

PROMPTS = [Prompt(f"p{number}", "c", (f"question {number}",)) for number in range(8)]
TOO_LONG = Prompt("long", "c", ("word " * 5000,))
ASKING = Asking(max_new_tokens=9, target="t")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = tmp_path / "target"
    export_model(tiny_gguf("llama", "Q8_0").write(tmp_path / "m.gguf"), out, options=ExportOptions())
    yield str(out), "ngram"
    assert listening() == set()


def listening() -> set[str]:
    """Addresses at which this process and its children accept connections."""
    me = psutil.Process()
    sockets = (each for one in (me, *me.children(recursive=True)) for each in one.net_connections("inet"))
    found = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    return {host.removeprefix("::ffff:") for host in found}


def test_a_cluster_of_two_answers_as_one_process_does(tmp_path: Path, names: tuple[str, str]) -> None:
    with edgespec.load(*names, options=edgespec.LoadOptions(threads=1)) as model:
        wanted = [answer(model, prompt, ASKING) for prompt in PROMPTS]
    place = tmp_path / "answers.jsonl"
    with answering_with_workers(names, ASKING, workers=2, threads=1) as answering:
        assert write_answers(answering, [*PROMPTS, TOO_LONG], place, ignore_progress, target="t") == 1
        hosts = listening()
    said = read_answers(place)
    assert sorted(said, key=lambda each: each.prompt) == wanted
    assert hosts == {"127.0.0.1"}
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_model_that_cannot_be_loaded_is_an_error(tmp_path: Path, names: tuple[str, str]) -> None:
    missing = (str(tmp_path / "nothing"), "ngram")
    with (
        pytest.raises(EdgespecError, match="nothing"),
        answering_with_workers(missing, ASKING, workers=2) as ask,
    ):
        list(ask(PROMPTS))


def test_a_worker_that_is_killed_is_an_error(names: tuple[str, str]) -> None:
    with (
        pytest.raises(EdgespecError, match="the workers ended"),
        answering_with_workers(names, ASKING, workers=2, threads=1) as ask,
    ):
        for said in ask([replace(prompt, turns=(f"again {n}",)) for n, prompt in enumerate(PROMPTS * 20)]):
            assert said is not None
            for process in psutil.Process().children(recursive=True):
                if process.name().startswith("ray::_Worker"):
                    process.kill()
