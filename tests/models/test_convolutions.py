"""Models with short convolutions over edgespec's kernels: rows are those of one plain run."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.loading.footprint import footprint_of
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import BLOCK, LOGGED
from edgespec_models.decoders.operations import Rope
from edgespec_models.decoders.transformer import FULL, SLIDING
from edgespec_models.errors import BundleError, RequestError
from edgespec_models.families.lfm2 import CONV, Lfm2
from edgespec_models.families.lfm3 import Lfm3
from edgespec_runtimes.block_files import BlockFiles
from edgespec_runtimes.cost import measure_context, measure_cost
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.kernels import sets
from tests.kit.native import edit_manifest, tiny_native
from tests.kit.states import check_rows, rows_in_one_pass
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import HALVES, LLAMA

TAPS = LLAMA.become(
    Lfm2,
    architecture="lfm2",
    num_layers=4,
    rope=HALVES,
    layer_types=(CONV, FULL, CONV, CONV),
    conv_taps=3,
)
WIDE_TAPS = replace(TAPS, conv_taps=5, layer_types=(FULL, CONV, CONV, FULL))
GATES = TAPS.become(
    Lfm3,
    architecture="lfm3",
    conv_taps=7,
    layer_types=(CONV, FULL, SLIDING, CONV),
    sliding_window=40,
    local_rope=Rope(name="rope_local", theta=100.0, width=32, pairs=16),
)
CONFIGS = {"three taps": TAPS, "five taps": WIDE_TAPS, "seven taps, windows, gates": GATES}
TEXT = [(7 * i * i + 3 * i) % 250 for i in range(300)]


@pytest.fixture(scope="module", params=CONFIGS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("lfm2") / "m", CONFIGS[request.param]).bundle


@pytest.fixture(scope="module")
def opened(bundle: Bundle) -> Iterator[Session]:
    session = open_cpu(bundle, CpuOptions(threads=2))
    yield session
    session.close()


@pytest.fixture(scope="module")
def plain(bundle: Bundle) -> Iterator[Session]:
    """A model of its own, which reads every text in one pass."""
    session = open_cpu(bundle, CpuOptions(threads=1))
    yield session
    session.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(opened: Session, plain: Session, data: st.DataObject) -> None:
    """Of several sequences: pieces of prompts, drafts and what is kept of them, rewinds, copies, failures."""

    def fail(session: Session) -> None:
        with pytest.raises(RequestError, match="token ids"):
            session.predict([5, -1])

    rows = partial(rows_in_one_pass, plain)
    check_rows(data, opened.model, rows, place_behind=lambda length: length // BLOCK * BLOCK, fail=fail)


def test_a_pass_that_fails_leaves_no_half_state(
    bundle: Bundle, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_cpu(bundle, CpuOptions(threads=1))
    session.predict(TEXT[:70])
    run = NativeModel.run_pass

    def broken(self: NativeModel, parts: object) -> list[Predictions]:
        run(self, parts)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NativeModel, "run_pass", broken)
        session.predict(TEXT[100:140])
    assert session.length == 2 * BLOCK
    again = session.predict(TEXT[session.length : 90]).logits
    np.testing.assert_array_equal(again, rows_in_one_pass(plain, TEXT[:90])[2 * BLOCK :])
    session.close()


def test_every_set_gives_the_same_bits(bundle: Bundle, plain: Session) -> None:
    whole = rows_in_one_pass(plain, TEXT[:80]).copy()
    for name in sets():
        session = open_cpu(bundle, CpuOptions(threads=2, instructions=name))
        rows = [session.predict(TEXT[at : at + 7]).logits.copy() for at in range(0, 80, 7)]
        session.close()
        np.testing.assert_array_equal(np.concatenate(rows)[: len(whole)], whole[:84])


def test_caches_put_aside_and_a_restart_give_the_same_rows(
    bundle: Bundle, plain: Session, tmp_path: Path
) -> None:
    texts = [TEXT[:200], [*TEXT[:150], *TEXT[250:300]], TEXT[100:180], TEXT[:131]]
    expected = [rows_in_one_pass(plain, text)[-1].copy() for text in texts]
    for start in range(2):
        session = open_cpu(bundle, CpuOptions(threads=1))
        caches = KvStore(1 << 22, BlockFiles(tmp_path / "prompts"))
        seats = [session, session.model.session()]
        for at, (text, row) in enumerate(zip(texts * 2, expected * 2, strict=True)):
            seat = seats[at % 2]
            caches.fetch(seat, text, [seats[1 - at % 2]])
            if start or at >= len(texts):
                assert seat.shared_prefix(text) >= (len(text) - 1) // BLOCK * BLOCK
            np.testing.assert_array_equal(seat.predict_next(text).logits[0], row)
            caches.write_behind()
        for seat in seats:
            seat.close()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_texts_are_those_without_drafts(tmp_path: Path, options: dict[str, Any]) -> None:
    """With n-grams, a drafter that has convolutions itself, and one of another vocabulary."""
    target = tiny_native(tmp_path / "target", TAPS).path
    alike = tiny_native(tmp_path / "alike", TAPS, role="drafter").path
    other = byte_level_json(size=330)
    bridged = tiny_native(tmp_path / "bridged", LLAMA, role="drafter", tokenizer_json=other).path
    prompts = ("one two three " * 6, "one two three " * 6 + "four", "one two three " * 3, "x")
    counts = same_with_drafts(target, ("ngram", alike, bridged), prompts, max_new_tokens=48, **options)
    assert all(drafted > 20 for drafted, _ in counts[1:])
    drafted, accepted = counts[1]
    assert options or accepted == drafted


def test_costs_and_sizes_count_convolutions(bundle: Bundle, opened: Session) -> None:
    config = bundle.config
    assert isinstance(config, Lfm2) and config.conv_taps is not None
    curve = measure_context(opened, measure_cost(opened, (1, 8, 32), repeats=1))
    assert opened.length == 0 and curve.seconds(32) > 0
    layers, before = config.layer_types.count(CONV), config.conv_taps - 1
    state = layers * (LOGGED + before) * config.hidden_size * 4
    token = layers * before * config.hidden_size * 4 // BLOCK
    token += (config.num_layers - layers) * 2 * config.num_kv_heads * config.head_dim * 2
    assert bundle.manifest.kv_bytes_per_token == token
    assert bundle.manifest.kept_bytes(100) == state + 100 * token
    assert footprint_of(bundle, exact_rows=True).cache.bytes(100) == state + 128 * token
    window = config.sliding_window or 100
    seen = config.layer_types.count(FULL) * 100 + config.layer_types.count(SLIDING) * window
    assert config.attended(100) == seen / config.num_layers
    session = open_cpu(bundle, CpuOptions(threads=1))
    session.predict(TEXT[:20])
    assert session.model.kv_bytes == state + BLOCK * token
    session.close()


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    tiny_native(tmp_path / "m", TAPS)
    edit_manifest(tmp_path / "m", lambda m: m["kept"][0].update(shape=[17, 96]))
    with pytest.raises(BundleError, match=r"do not fit each other .*past_inputs\.0"):
        open_cpu(Bundle(tmp_path / "m"))
