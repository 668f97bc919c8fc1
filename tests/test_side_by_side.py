"""Several sequences side by side in one model, each as if alone; and answers, which are the model's own."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.align import answering as answering_module
from edgespec.align.answering import answer, answer_side_by_side, answering
from edgespec.align.answers import Answer, Asking
from edgespec.measuring.prompts import Prompt
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.memory import machine_memory
from edgespec_runtimes.side_by_side import SideBySide, can_run_side_by_side
from tests.gguf_for_tests import tiny_gguf
from tests.native_for_tests import tiny_native

CHUNKS = CpuOptions(threads=1, prefill_chunk=5)
"""So that a prompt is read in several passes."""
PROMPTS = [Prompt(f"p{i}", "c", ("word " * (i % 5) + f"question {i}",)) for i in range(21)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("side") / "bundle").bundle


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Iterator[SideBySide]:
    with closing(SideBySide(bundle, CHUNKS)) as opened:
        yield opened


TOKENS = st.lists(st.integers(0, 403), min_size=1, max_size=20)


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(TOKENS, min_size=1, max_size=5), again=TOKENS, steps=st.integers(1, 6))
def test_every_sequence_is_as_if_it_were_alone(
    bundle: Bundle, session: SideBySide, texts: list[list[int]], again: list[int], steps: int
) -> None:
    session.reserve(len(texts), 48)
    said = [session.begin(at, text) for at, text in enumerate(texts)]
    for step in range(steps):
        if step == 2:  # another text in the place of the first, which it shares a beginning with
            texts[0] = [*texts[0][:1], *again]
            said[0] = session.begin(0, texts[0])
        texts = [[*text, one.best(0)] for text, one in zip(texts, said, strict=True)]
        said = session.extend([text[-1] for text in texts])
    with closing(CpuSession(bundle, CHUNKS)) as alone:
        for text, one in zip(texts, said, strict=True):
            alone.truncate(0)
            wanted = alone.predict_next(text)
            np.testing.assert_array_equal(one.logits, wanted.logits)
            assert one.best(0) == wanted.best(0) and one.probability(0) == wanted.probability(0)


def test_a_sequence_that_is_emptied_begins_anew(bundle: Bundle, session: SideBySide) -> None:
    session.reserve(2, 32)
    before = session.begin(0, [1, 2, 3, 4]).logits.copy()
    session.begin(1, [5])
    for _ in range(31):  # beyond the room that the first would have had
        session.extend([None, 6])
    np.testing.assert_array_equal(session.begin(0, [1, 2, 3, 4]).logits, before)
    with pytest.raises(DeviceError, match="more tokens than its KV cache has room for"):
        session.extend([7, 7])


def test_room_that_there_is_no_memory_for(session: SideBySide) -> None:
    with pytest.raises(DeviceError, match="not enough memory for 1048576 caches"):
        session.reserve(1 << 20, 1 << 20)
    assert session.sequences == 0
    session.reserve(1, 16)
    assert session.begin(0, [1]).shape[0] == 1


def test_bundles_of_before_are_to_be_exported_again(tmp_path: Path) -> None:
    bundle = tiny_native(tmp_path / "old").bundle
    graph = onnx.load(bundle.graph, load_external_data=False)
    (length,) = (each for each in graph.graph.input if each.name == "past_length")
    length.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(graph, bundle.graph)
    with pytest.raises(BundleError, match="was made by an earlier version; export the model again"):
        SideBySide(bundle, CHUNKS)


# ---- Answers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("answers")
    export_model(tiny_gguf("llama", "Q8_0").write(folder / "m.gguf"), folder / "t", options=ExportOptions())
    return str(folder / "t")


def side_by_side(target: str, prompts: list[Prompt], asking: Asking) -> list[Answer | None]:
    with answering((target, "ngram"), asking, threads=1) as given:
        return list(given(prompts))


def alone(target: str, prompts: list[Prompt], asking: Asking) -> list[Answer | None]:
    with edgespec.load(target, "ngram", options=edgespec.LoadOptions(threads=1)) as model:
        return [answer(model, prompt, asking) for prompt in prompts]


def sorted_by_prompt(answers: Iterable[Answer | None]) -> list[Answer]:
    return sorted((each for each in answers if each is not None), key=lambda each: each.prompt)


@pytest.mark.parametrize("most", [1, 2, 30])
def test_answers_are_those_of_the_model(target: str, most: int) -> None:
    asking = Asking(max_new_tokens=most, target="t")
    said = sorted_by_prompt(side_by_side(target, PROMPTS, asking))
    assert said == sorted_by_prompt(alone(target, PROMPTS, asking))
    assert {each.temperature for each in said} == {0.0, 0.8}


def test_what_the_model_ends_is_complete(target: str) -> None:
    """One token of twenty ends an answer here."""
    bundle, asking = Bundle(Path(target)), Asking(max_new_tokens=40, target="t")
    with closing(SideBySide(bundle, CHUNKS)) as session:
        said = sorted_by_prompt(answer_side_by_side(bundle, session, PROMPTS, asking))
        assert not any(each.complete for each in said)
        special = replace(bundle.manifest.special_tokens, eos=tuple(range(7, bundle.config.vocab_size, 20)))
        bundle.manifest = replace(bundle.manifest, special_tokens=special)
        ended = sorted_by_prompt(answer_side_by_side(bundle, session, PROMPTS, asking))
    assert len(ended) == len(said) and any(each.complete for each in ended)
    for whole, part in zip(said, ended, strict=True):
        assert part.complete or part == whole
        assert whole.text.startswith(part.text.rstrip("\ufffd"))  # it may end within a character


def test_long_prompts_have_caches_of_their_own_and_unreadable_ones_are_left_out(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token, asking = Bundle(Path(target)).manifest.kv_bytes_per_token, Asking(max_new_tokens=8, target="t")
    memory = replace(machine_memory(), available=128 * per_token * answering_module._SHARE)
    monkeypatch.setattr(answering_module, "machine_memory", lambda: memory)
    monkeypatch.setattr(answering_module, "_SHORTEST", 32)
    monkeypatch.setattr(answering_module, "_ENCODED", 7)
    rooms, reserve = list[tuple[int, int]](), SideBySide.reserve

    def watched(self: Any, sequences: int, capacity: int) -> None:
        rooms.append((sequences, capacity))
        reserve(self, sequences, capacity)

    monkeypatch.setattr(SideBySide, "reserve", watched)
    sizes = [1, 1, 1, 1, 1, 30, 30, 60, 5000]
    prompts = [Prompt(f"p{i}", "c", (f"{i} " + "w " * size,)) for i, size in enumerate(sizes)]
    prompts.insert(0, Prompt("bad", "c", ("\ud800",)))
    said, wanted = (answers(target, prompts, asking) for answers in (side_by_side, alone))
    assert sorted_by_prompt(said) == sorted_by_prompt(wanted)
    assert len(said) == len(prompts) and said.count(None) == wanted.count(None) == 2
    assert rooms[0] == (4, 32) and all(count * capacity <= 128 or count == 1 for count, capacity in rooms)
    assert len({capacity for _, capacity in rooms}) > 1


def test_a_drafter_is_no_target(tmp_path: Path) -> None:
    drafter = tiny_native(tmp_path / "d", role="drafter").bundle
    with pytest.raises(RequestError, match="was exported as a drafter"):
        side_by_side(str(drafter.path), [], Asking())


def test_other_graphs_answer_one_after_the_other(tmp_path: Path, target: str) -> None:
    source = tiny_gguf("llama", "Q8_0").write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "p", options=ExportOptions(weights="portable"))
    assert can_run_side_by_side(Bundle(Path(target))) and not can_run_side_by_side(Bundle(tmp_path / "p"))
    said = side_by_side(str(tmp_path / "p"), PROMPTS, Asking(max_new_tokens=5, target="t"))
    assert [each.prompt for each in said if each is not None] == [p.turns[0] for p in PROMPTS]
