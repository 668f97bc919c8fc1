"""Trimmed vocabularies: which tokens stay, how far to trim, and drafters that write fewer tokens."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions
from edgespec.drafting.model import context_tokens
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs import calibration, trim
from edgespec_export.graphs.calibration import read_texts, shipped_texts, written_by
from edgespec_export.graphs.parity import Golden, check_parity
from edgespec_export.graphs.trim import TokenOrder, TrimChoice, weigh
from edgespec_export.options import TrimSize
from edgespec_models.bundles.bundle import HEAD_TOKENS, Bundle
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, RequestError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import open_cpu
from tests.kit.gguf import ARCHITECTURES, TinyGGUF, tiny_gguf
from tests.kit.native import tiny_native
from tests.kit.tokenizers import CORPUS, byte_level_json, sentencepiece_json
from tests.kit.toy import LLAMA

TOKENIZERS = {
    name: Tokenizer.from_json(text())
    for name, text in (("bytes", byte_level_json), ("sentencepiece", sentencepiece_json))
}
KEPT = 320
"""A multiple of what the kernels compute at once: the last rows of other numbers are summed otherwise."""
TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 380]


def _order(name: str = "bytes") -> TokenOrder:
    return TokenOrder([list(CORPUS)], TOKENIZERS[name], [2])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@given(data=st.binary(max_size=40))
def test_whatever_is_kept_every_text_can_be_written(name: str, data: bytes) -> None:
    order = _order(name)
    kept = set(order.tokens(order.required).tolist())
    tokenizer = TOKENIZERS[name]
    spelled = [next(t for t in kept if tokenizer.token_bytes(t) == data[i : i + 1]) for i in range(len(data))]
    assert tokenizer.bytes_of(spelled) == data
    assert {t for t in range(tokenizer.vocab_size) if tokenizer.is_special(t)} <= kept


@pytest.mark.parametrize("name", TOKENIZERS)
def test_larger_vocabularies_hold_the_smaller_ones(name: str) -> None:
    order = _order(name)
    sizes = [*range(order.required, order.whole, 7), order.whole]
    kept = [set(order.tokens(size).tolist()) for size in sizes]
    assert all(small < large for small, large in itertools.pairwise(kept))
    coverage = [order.coverage(size) for size in sizes]
    assert coverage == sorted(coverage) and coverage[-1] == pytest.approx(1.0)


def test_frequent_tokens_stay_and_every_source_weighs_the_same() -> None:
    tokenizer = TOKENIZERS["bytes"]
    words = set(tokenizer.encode(CORPUS[0]))
    order = TokenOrder([[CORPUS[0]] * 9], tokenizer, [])
    assert words <= set(order.tokens(order.required + len(words)).tolist())
    alone = TokenOrder([[CORPUS[0]] * 5, [CORPUS[2]] * 5], tokenizer, [])
    long = TokenOrder([[CORPUS[0]] * 500, [CORPUS[2]] * 5], tokenizer, [])
    for size in range(alone.required, alone.whole, 5):
        assert alone.tokens(size).tolist() == long.tokens(size).tolist()


def test_coverage_is_of_texts_that_were_not_counted() -> None:
    tokenizer = TOKENIZERS["bytes"]
    held, counted = " proposes" * 20, set(tokenizer.encode(CORPUS[0]))
    order = TokenOrder([[held, *[CORPUS[0]] * 4]], tokenizer, [])  # the first of five is held out
    kept = counted | set(order.tokens(order.required).tolist())
    ids = tokenizer.encode(held)
    assert order.coverage(len(kept)) == pytest.approx(sum(token in kept for token in ids) / len(ids))
    assert order.coverage(len(kept)) < 1.0


def test_sizes_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _order()
    least, most = order.required, order.whole - 1
    monkeypatch.setattr(trim, "CANDIDATES", (least - 1, least, most, most + 1))
    assert order.candidates == (least, most)
    for size in (1, 200, 100_000):
        with pytest.raises(RequestError, match="can keep"):
            order.check(size)
    assert ExportOptions(trim=1).trim == 1
    with pytest.raises(RequestError, match="trim is 0"):
        ExportOptions(trim=0)


def test_what_a_choice_promises_is_the_expected_rate() -> None:
    order = _order()
    target = CostCurve({1: 1.0, 2: 1.1, 3: 1.2})
    some, whole = weigh(order, {300: 0.5, order.whole: 0.6}, lambda rows: rows / 4000, target)

    def best(a: float, rows: int) -> float:
        return max(sum(a**i for i in range(k + 1)) / (1 + k / 10 + k * rows / 4000) for k in range(9))

    assert some.relative_tokens_per_second == pytest.approx(best(0.5, 300) / best(0.6, order.whole))
    assert (some.acceptance, whole.acceptance) == (0.5, 0.6)
    dear, _ = weigh(order, {300: 0.5, order.whole: 0.6}, float, target)  # nothing is drafted
    assert dear.relative_tokens_per_second == 1.0


@pytest.mark.parametrize(
    ("promises", "kept"),
    [((1.0365, 1.0314, 1.02, 1.0), 1), ((1.012, 1.009, 1.0, 1.0), 1), ((1.009, 1.005, 0.9, 1.0), 3)],
)
def test_of_promises_that_are_nearly_the_best_the_most_rows_are_kept(
    promises: tuple[float, ...], kept: int
) -> None:
    choices = [TrimChoice(rows, 1.0, 0.5, 1.0, promise) for rows, promise in enumerate(promises)]
    assert trim._best(choices).rows == kept


def _drafter(
    folder: Path, model: TinyGGUF, size: TrimSize = KEPT, progress: ProgressCallback = ignore_progress
) -> Bundle:
    source = model.write(folder / "m.gguf")
    options = ExportOptions(role="drafter", weights="exact", trim=size)
    export_model(source, folder / f"out-{size}", options=options, progress=progress)
    return Bundle(folder / f"out-{size}", verify_digests=True)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rows_that_stay_give_the_same_logits(tmp_path: Path, architecture: str, kind: str) -> None:
    model = tiny_gguf(architecture, kind)
    trimmed, whole = _drafter(tmp_path, model), _drafter(tmp_path, model, "full")
    assert whole.head_tokens is None
    kept = trimmed.head_tokens
    assert kept is not None and len(kept) == KEPT == trimmed.manifest.head_rows
    logits = [open_cpu(bundle).predict(TOKENS).logits.copy() for bundle in (trimmed, whole)]
    # Where words of the context get columns too, the last norm is ONNX Runtime's.
    np.testing.assert_allclose(logits[0][:, :KEPT], logits[1][:, kept], rtol=1e-5, atol=1e-5)
    assert isinstance(trimmed.config, Transformer)
    hidden = trimmed.config.hidden_size
    assert trimmed.manifest.parameters_by_class["lm_head"] == KEPT * hidden
    assert trimmed.manifest.bytes_per_pass < whole.manifest.bytes_per_pass
    report, whole_rows = trimmed.report()["trim"], trimmed.config.vocab_size
    assert (report["rows"], report["of"]) == (KEPT, whole_rows)
    assert [choice["rows"] for choice in report["choices"]] == [KEPT, whole_rows]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama"])
def test_offered_tokens_can_be_written_too(tmp_path: Path, architecture: str, kind: str) -> None:
    model = tiny_gguf(architecture, kind)
    session = open_cpu(_drafter(tmp_path, model))
    whole = open_cpu(_drafter(tmp_path, model, "full"))
    assert session.model.head_tokens is not None
    offered = [t for t in range(whole.model.vocab_size) if t not in session.model.head_tokens][:9]
    expected = whole.predict(TOKENS).logits.copy()
    for tokens in (offered[:3], offered[2:], []):
        session.model.offer(tokens)
        session.prefill(TOKENS[:3])
        logits = session.predict(TOKENS[3:]).logits.copy()
        columns = session.model.head_tokens
        assert columns[KEPT : KEPT + len(tokens)].tolist() == tokens
        assert logits.shape[1] == len(columns)
        error = np.linalg.norm(logits - expected[3:, columns]) / np.linalg.norm(logits)
        assert error < 0.02  # the embedding meets float activations, the LM head 8-bit ones
        session.rewind(0)


def test_a_head_of_its_own_takes_no_offers_and_a_small_vocabulary_is_left_alone(tmp_path: Path) -> None:
    session = open_cpu(_drafter(tmp_path, tiny_gguf("llama")))
    session.model.offer([1, 2, 3])
    assert session.model.head_tokens is not None and len(session.model.head_tokens) == KEPT
    assert session.predict(TOKENS).logits.shape == (len(TOKENS), KEPT)
    assert _drafter(tmp_path, tiny_gguf("llama"), "auto").head_tokens is None


class _Words:
    """A tokenizer of these words."""

    words = tuple(b"the| the|The| The|thhe|THhe|tTHhe|cat| Cat||9|Xerox| xerox|erox".split(b"|"))

    def is_special(self, token: int) -> bool:
        return token == 9

    def token_bytes(self, token: int) -> bytes:
        return self.words[token]

    def id_of_bytes(self, data: bytes) -> int | None:
        return self.words.index(data) if data in self.words else None


NONE = np.array([], np.int32)
OFFERED: list[tuple[list[int], set[int]]] = [([0], {0, 1, 2, 3}), ([3], {0, 1, 2, 3}), ([8], {7, 8})]
OFFERED += [([10, 9], {10}), ([0, 7], {0, 1, 2, 3, 7, 8}), ([11], {11, 12})]


@pytest.mark.parametrize(("prompt", "offered"), OFFERED)
def test_spellings_differ_in_a_space_and_the_first_letter(prompt: list[int], offered: set[int]) -> None:
    assert set(context_tokens(prompt, cast(Tokenizer, _Words()), NONE)) == offered


def test_long_prompts_offer_their_latest_words() -> None:
    ids = list(range(2, 390))
    offered = context_tokens(ids, TOKENIZERS["bytes"], NONE)
    assert len(offered) == 192 and offered[0] == ids[-1]
    assert set(offered) == set(context_tokens(ids[-300:], TOKENIZERS["bytes"], NONE))


@pytest.fixture
def sizing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Tiny vocabularies may be trimmed to 280 and 320 tokens; a pass takes so many seconds."""

    def put(seconds: float) -> None:
        monkeypatch.setattr(trim, "CANDIDATES", (280, 320))
        monkeypatch.setattr(trim, "measure_cost", lambda session, rows: CostCurve({1: seconds}))

    return put


def test_auto_measures_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizing: Callable[[float], None]
) -> None:
    sizing(1e-2)
    monkeypatch.setattr(trim, "_best", lambda choices: choices[0])  # random models accept nothing
    seen = list[Progress]()
    bundle = _drafter(tmp_path, tiny_gguf("llama"), "auto", seen.append)
    assert Progress("Sizing the vocabulary", 1, 1, "step") in seen
    assert bundle.manifest.head_rows == 280
    choices = bundle.report()["trim"]["choices"]
    assert [choice["rows"] for choice in choices] == [280, 320, bundle.config.vocab_size]
    steps = [choice["step_ms"] for choice in choices]
    assert 2.5 < steps[0] < steps[1] < steps[2] == pytest.approx(10.0)
    assert sorted(file.name for file in bundle.path.iterdir() if file.is_dir()) == []


def test_auto_keeps_all_where_little_is_promised(tmp_path: Path, sizing: Callable[[float], None]) -> None:
    sizing(1e-3)
    assert _drafter(tmp_path, tiny_gguf("llama"), "auto").head_tokens is None


@pytest.mark.parametrize("size", [300, "auto"])
def test_targets_are_not_trimmed(tmp_path: Path, size: TrimSize) -> None:
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="must be able to write every token"):
        export_model(source, tmp_path / "out", options=ExportOptions(trim=size))
    assert not (tmp_path / "out").exists()


def test_a_trimmed_drafter_changes_no_output(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = tiny_native(tmp_path / "target", LLAMA, "Q4_1").path
    drafter = _drafter(tmp_path, tiny_gguf("llama")).path
    request.getfixturevalue("cheap_drafts")  # after the export, which measures too
    with edgespec.load(target, drafter, options=LoadOptions(threads=1)) as model:
        drafted = model.generate("def add(a, b):", max_new_tokens=40)
        plain = model.generate("def add(a, b):", max_new_tokens=40, speculate=False)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0
    with pytest.raises(RequestError, match="exported as a drafter"):
        edgespec.load(drafter, None)


def test_a_damaged_list_of_tokens_is_found(tmp_path: Path) -> None:
    folder = _drafter(tmp_path, tiny_gguf("llama")).path
    kept = Bundle(folder).head_tokens
    assert kept is not None
    pickled = np.array([{}], object)
    for damaged in (kept[::-1], kept + 10_000, kept[:-1], kept.astype(np.int64), pickled):
        np.save(folder / HEAD_TOKENS, damaged, allow_pickle=True)
        with pytest.raises(BundleError, match="export"):
            _ = Bundle(folder).head_tokens


def test_parity_of_a_trimmed_head_is_given_what_it_can_write() -> None:
    ids = np.array([[7, 3, 5], [3, 5, 7], [5, 7, 1]], np.int32)
    logprobs = np.log(np.array([[0.6, 0.3, 0.1]] * 3, np.float32))
    golden = Golden("m", ("en",), ((1, 2, 3),), (ids,), (logprobs,))
    kept = np.array([3, 5, 9], np.int32)
    rows = np.log(np.array([[0.75, 0.25, 1e-9], [2 / 3, 1 / 3, 1e-9], [0.1, 0.9, 0.5]], np.float32))
    report = check_parity([[rows]], golden, kept)
    assert report["positions"] == 3
    assert report["top1_agreement"] == 1.0
    assert report["kl"] == pytest.approx(0.0, abs=1e-6)


def test_calibration_files(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    with pytest.raises(RequestError, match="cannot read"):
        read_texts(path)
    path.write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n', encoding="utf-8")
    assert read_texts(path) == ["one", "two"]
    wrong = {"": "holds no", "{": "line 1", '{"text": "a"}\n{"no": 1}': "line 2", "[1]": "line 1"}
    for content, message in (wrong | {'{"text": 3}': "text is 3; allowed: a text"}).items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(RequestError, match=message):
            read_texts(path)


def test_the_shipped_text_comes_from_several_targets() -> None:
    assert len(shipped_texts()) > 200
    assert len({record["target"] for record in calibration._shipped()}) >= 2


def test_a_target_writes_calibration_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_PROMPTS", 3)
    monkeypatch.setattr(calibration, "_TOKENS", 4)
    bundle = tiny_native(tmp_path / "target", LLAMA, "Q4_1")
    stages: list[tuple[int, int]] = []
    texts, curve = written_by(bundle.path, lambda step: stages.append((step.done, step.total)))
    assert len(texts) == 3
    assert curve.seconds(1) > 0
    assert stages == [(0, 3), (1, 3), (2, 3), (3, 3)]
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    options = ExportOptions(role="drafter", trim=KEPT, calibrate_with=(bundle.path,))
    export_model(source, tmp_path / "out", options=options)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["trim"]["texts"] == 3
