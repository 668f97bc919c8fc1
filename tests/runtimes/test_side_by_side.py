"""Several sequences side by side in one model, each as if alone; and answers, which are the model's own."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.align.answering import answering
from edgespec.align.answers import Answer
from edgespec.asking.request import RequestOptions
from edgespec.measuring.prompts import Prompt
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import Rows, Session
from tests.kit.gguf import tiny_gguf
from tests.kit.native import tiny_native
from tests.kit.toy import tiny_bundle

CHUNKS = CpuOptions(threads=1, prefill_chunk=5)
"""So that a prompt is read in several passes."""
PROMPTS = [Prompt(f"p{i}", "c", ("word " * (i % 5) + f"question {i}",)) for i in range(21)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("side") / "bundle").bundle


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Iterator[Session]:
    with closing(open_cpu(bundle, CHUNKS)) as opened:
        yield opened


TOKENS = st.integers(0, 403)
TEXTS = st.lists(TOKENS, min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sequence_is_as_if_it_were_alone(bundle: Bundle, session: Session, data: st.DataObject) -> None:
    """Whatever they read in whichever passes, how often they are rolled back, and what room others need."""
    together = [session, *(session.model.session() for _ in range(data.draw(st.integers(0, 4))))]
    texts: list[list[int]] = [[] for _ in together]
    session.rewind(0)
    for _ in range(data.draw(st.integers(1, 6))):
        for sequence, text in zip(together, texts, strict=True):
            keep = data.draw(st.integers(0, len(text)))
            sequence.rewind(keep)
            del text[keep:]
            if not data.draw(st.integers(0, 9)):
                sequence.reserve(min(sequence.model.longest, sequence.capacity + 200))
        who = data.draw(st.lists(st.sampled_from(range(len(together))), min_size=1, unique=True))
        parts = [data.draw(TEXTS) for _ in who]
        batch = [
            Rows(together[at], part, data.draw(st.integers(0, len(part))))
            for at, part in zip(who, parts, strict=True)
        ]
        predictions = session.model.predict_together(batch)
        with closing(open_cpu(bundle, CHUNKS)) as alone:
            for at, part, rows, one in zip(who, parts, batch, predictions, strict=True):
                alone.prefill(texts[at])
                wanted = alone.predict(part).logits[len(part) - rows.wanted :]
                np.testing.assert_array_equal(one.logits, wanted)
                assert one.shape == (rows.wanted, 404)
                assert [one.best(row) for row in range(rows.wanted)] == list(wanted.argmax(-1))
                texts[at] += part
                assert together[at].length == len(texts[at])
    for sequence in together[1:]:
        sequence.close()


def test_the_model_goes_with_its_last_session(bundle: Bundle) -> None:
    first = open_cpu(bundle, CHUNKS)
    wanted = first.predict([1, 2, 3]).logits.copy()
    second = first.model.session()
    first.close()
    np.testing.assert_array_equal(second.predict([1, 2, 3]).logits, wanted)
    assert first.kv_bytes == 0 < second.kv_bytes
    second.close()
    for sequence in (first, second):
        with pytest.raises(RequestError, match="closed"):
            sequence.predict([1])


def test_beginnings_are_there_once(bundle: Bundle) -> None:
    """In sessions side by side and in memory; what nobody has is given back."""
    with closing(open_cpu(bundle, CHUNKS)) as first, closing(first.model.session()) as second:
        text, model, store = list(range(300)), first.model, KvStore(1 << 30)
        first.prefill(text)
        alone = model.kv_bytes
        assert alone == first.kv_bytes == 10 * model.block_bytes
        store.fetch(second, [*text, 5], [first])
        assert second.length == 300 and model.kv_bytes == alone
        wanted = first.predict([5]).logits.copy()  # in a copy of the last block, which others have too
        assert model.kv_bytes == alone + model.block_bytes
        np.testing.assert_array_equal(second.predict([5]).logits, wanted)
        store.fetch(first, [403])
        first.release()
        assert store.nbytes == first.model.kv_bytes - second.kv_bytes + 9 * model.block_bytes
        store.fetch(first, [*text, 5])
        assert first.length == 301
        first.rewind(0)
        store.forget(first)
        assert model.kv_bytes == second.kv_bytes


def test_blocks_that_there_is_no_memory_for_cost_the_others_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_cpu(bundle, CHUNKS)) as first, closing(first.model.session()) as second:
        second.prefill([1, 2, 3])
        expected = second.predict([7]).logits.copy()
        second.release()
        first.prefill([1, 2, 3])
        zeros = np.zeros

        def scarce(shape: tuple[int, ...], kind: type) -> object:
            if len(shape) == 4:
                raise MemoryError
            return zeros(shape, kind)

        with monkeypatch.context() as patch, pytest.raises(DeviceError, match="not enough memory"):
            patch.setattr(np, "zeros", scarce)
            second.predict([1] * 300)
        assert (first.length, second.length) == (3, 0)
        np.testing.assert_array_equal(first.predict([7]).logits, expected)


def test_bundles_of_before_are_to_be_exported_again(tmp_path: Path) -> None:
    bundle = tiny_native(tmp_path / "old").bundle
    graph = onnx.load(bundle.graph, load_external_data=False)
    for value in graph.graph.input:
        value.name = value.name.replace("blocks", "past_length")
    for node in graph.graph.node:
        node.input[:] = [name.replace("blocks", "past_length") for name in node.input]
    onnx.save(graph, bundle.graph)
    with pytest.raises(BundleError, match="was made by an earlier version; export the model again"):
        open_cpu(bundle, CHUNKS)


def test_what_cannot_stand_beside_each_other(bundle: Bundle, session: Session, tmp_path: Path) -> None:
    with closing(open_cpu(tiny_bundle(tmp_path / "m").bundle, CHUNKS)) as portable:
        assert session.model.takes_several and not portable.model.takes_several
        with pytest.raises(RequestError, match="of one sequence"):
            portable.model.session()
        with pytest.raises(RequestError, match="another model's"):
            session.model.predict_together([Rows(portable, [1], 1)])


# ---- Answers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("answers")
    export_model(tiny_gguf("llama", "Q8_0").write(folder / "m.gguf"), folder / "t", options=ExportOptions())
    return str(folder / "t")


def side_by_side(target: str, prompts: Sequence[Prompt], asked: RequestOptions) -> list[Answer | None]:
    with answering((target, "ngram"), asked, threads=1) as given:
        return list(given(prompts))


def alone(target: str, prompts: Sequence[Prompt], asked: RequestOptions) -> list[Answer | None]:
    return [one for prompt in prompts for one in side_by_side(target, [prompt], asked)]


def sorted_by_prompt(answers: Iterable[Answer | None]) -> list[Answer]:
    return sorted((answer for answer in answers if answer is not None), key=lambda answer: answer.prompt)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("most", [1, 2, 30])
def test_answers_are_those_of_the_model(target: str, most: int, temperature: float) -> None:
    options = RequestOptions(max_new_tokens=most, temperature=temperature)
    answers = sorted_by_prompt(side_by_side(target, PROMPTS, options))
    assert answers == sorted_by_prompt(alone(target, PROMPTS, options))
    assert {answer.temperature for answer in answers} == {temperature}


def test_a_drafter_is_no_target(tmp_path: Path) -> None:
    drafter = tiny_native(tmp_path / "d", role="drafter").bundle
    with pytest.raises(RequestError, match="was exported as a drafter"):
        side_by_side(str(drafter.path), [], RequestOptions())


def test_other_graphs_answer_one_after_the_other(tmp_path: Path) -> None:
    source = tiny_gguf("llama", "Q8_0").write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "p", options=ExportOptions(weights="portable"))
    prompts = [Prompt("bad", "c", ("\ud800",)), *PROMPTS, Prompt("long", "c", ("w " * 5000,))]
    answers = side_by_side(str(tmp_path / "p"), prompts, RequestOptions(max_new_tokens=5))
    assert [answer.prompt for answer in answers if answer is not None] == [p.turns[0] for p in PROMPTS]
    assert len(answers) == len(prompts)
