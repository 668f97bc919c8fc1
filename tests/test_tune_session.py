"""Sessions with other gains: the bits of a bundle that has them stored; what cannot be tuned says so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.errors import RequestError
from edgespec_models.files.onnx_header import read_header
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Session
from tests.kit.foreign import ForeignSpec, write_genai, write_optimum
from tests.kit.native import tiny_native
from tests.kit.toy import F32, GEMMA, INT4, LLAMA, TinyModel, tiny_bundle

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63]


def _session(bundle: Bundle) -> Session:
    return open_cpu(bundle, CpuOptions(threads=1, exact_rows=False))


def _other(model: TinyModel, seed: int = 1) -> dict[str, F32]:
    """Gains that are not the bundle's."""
    rng = np.random.default_rng(seed)
    stored = {name: gain for name, gain in model.weights.items() if name.endswith("norm.weight")}
    return {
        name: gain * rng.uniform(0.7, 1.3, gain.shape).astype(np.float32) for name, gain in stored.items()
    }


def _stored(model: TinyModel, gains: dict[str, F32], folder: Path) -> Bundle:
    """A copy of the bundle that has ``gains``."""
    shutil.copytree(model.path, folder)
    weights = read_header(folder / GRAPH).weights
    with (folder / f"{GRAPH}.data").open("r+b") as file:
        for name, gain in gains.items():
            file.seek(weights[name].offset)
            file.write(gain.tobytes())
    return Bundle(folder)


def _passes(session: Session) -> F32:
    """Logits of passes of several widths."""
    session.rewind(0)
    logits = [session.predict_next(TOKENS).logits.copy()]
    session.rewind(0)
    parts = TOKENS[:5], TOKENS[5:6], TOKENS[6:8], TOKENS[8:]
    return np.concatenate(logits + [session.predict(part).logits.copy() for part in parts])


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", INT4], ids=str)
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_a_tuned_session_gives_the_bits_of_a_bundle_with_these_gains(
    tmp_path: Path, config: ModelConfig, form: WeightFormat | str
) -> None:
    if isinstance(form, str):
        model = tiny_native(tmp_path / "m", config, form, role="drafter")
    else:
        model = tiny_bundle(tmp_path / "m", config, form, role="drafter")
    gains = _other(model)
    session, other = _session(model.bundle), _session(_stored(model, gains, tmp_path / "other"))
    assert session.model.tunable == gains.keys()
    session.reserve(300)
    before, room = _passes(session), session.capacity
    session.model.tune(gains)
    assert session.length == session.shared_prefix(TOKENS) == 0
    assert session.capacity == room
    tuned = _passes(session)
    np.testing.assert_array_equal(tuned, _passes(other))
    assert np.abs(tuned[0] - before[0]).max() > 1e-2
    for gain in gains.values():
        gain[:] = 0.0
    session.reserve(600)
    session.model.offer([1, 2])  # no trimmed head: no notice
    np.testing.assert_array_equal(tuned, _passes(session))
    other.close()
    session.close()


def test_the_stored_gains_give_the_stored_bits_and_onnx_runtime_warns_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_native(tmp_path / "m", GEMMA, role="drafter")
    session = _session(model.bundle)
    before = _passes(session)
    for gains in ({name: model.weights[name] for name in session.model.tunable}, {}):  # {}: none are replaced
        session.model.tune(_other(model))
        assert not np.array_equal(_passes(session)[0], before[0])
        session.model.tune(gains)
        np.testing.assert_array_equal(_passes(session), before)
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.predict([1])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (3,)) for name in ("rope_cos", "lm_head.parts.0.weight", "input_ids", "nonsense")),
        *(("final_norm.weight", shape) for shape in ((95,), (97,), (1,), (2, 48))),
    ],
)
def test_unknown_weights_and_other_shapes_are_refused_and_change_nothing(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    model = tiny_native(tmp_path / "m", role="drafter")
    session = _session(model.bundle)
    before = _passes(session)
    with pytest.raises(RequestError, match=name):
        session.model.tune({**_other(model), name: np.ones(shape, np.float32)})
    assert session.length == len(TOKENS)
    np.testing.assert_array_equal(_passes(session), before)
    session.close()


OTHERS: list[Callable[[Path], object]] = [
    tiny_native,
    tiny_bundle,
    lambda folder: write_genai(folder, ForeignSpec()),
    lambda folder: write_optimum(folder, ForeignSpec(attention="concat")),
]


@pytest.mark.parametrize("write", OTHERS)
def test_other_graphs_have_nothing_to_tune(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "m")
    session = _session(open_bundle(tmp_path / "m"))
    assert session.model.tunable == frozenset()
    with pytest.raises(RequestError, match="replaced"):
        session.model.tune({"final_norm.weight": np.ones(96, np.float32)})
    session.close()
