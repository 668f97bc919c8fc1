"""What sequences keep, as manifests declare it, and layers that a backend lacks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.loading.footprint import footprint_of
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import KeptTensor, bytes_per_sequence, bytes_per_token, types_of
from edgespec_models.decoders.operations import Experts
from edgespec_models.decoders.transformer import FULL, Transformer
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.families.lfm2 import CONV, Lfm2
from edgespec_models.graphs.decoder import build_decoder
from edgespec_models.graphs.native import build_native
from edgespec_models.graphs.static_decoder import StaticPlan, build_static_decoder
from edgespec_runtimes.cpu import open_cpu
from tests.kit.native import edit_manifest, native_plan, tiny_native
from tests.kit.toy import FLOAT, LLAMA, tiny_bundle
from tests.kit.weights import tiny_plan

KEY = KeptTensor(input="k", output="k+", per="token", shape=(2, 16), type="float16")
KEPT = (
    KEY,
    replace(KEY, input="v", shape=(4, 8), type="uint8"),
    replace(KEY, input="narrow", shape=(1, 8), type="float32"),
    replace(KEY, input="state", per="sequence", shape=(3, 5, 7), type="float32"),
)


def test_sizes_are_sums_of_tensors_that_may_differ() -> None:
    assert [tensor.nbytes for tensor in KEPT] == [64, 32, 32, 420]
    assert (bytes_per_token(KEPT), bytes_per_sequence(KEPT)) == (128, 420)
    assert types_of(KEPT) == "float16, float32, uint8" and KEY.of_tokens(9) == (1, 2, 9, 16)
    with pytest.raises(BundleError, match=r"k has rows of shape .* heads and width"):
        replace(KEY, shape=(4,))


def test_a_plan_counts_states_once(tmp_path: Path) -> None:
    bundle = tiny_native(tmp_path / "m").bundle
    manifest = bundle.manifest
    plain = manifest.kept_bytes(100)
    assert plain == 100 * LLAMA.num_layers * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2
    before = footprint_of(bundle, exact_rows=True)
    bundle.manifest = replace(manifest, kept=(*manifest.kept, KEPT[-1]))
    after = footprint_of(bundle, exact_rows=True)
    assert bundle.manifest.kept_bytes(100) == plain + 420
    assert [after.cache.bytes(n) - before.cache.bytes(n) for n in (1, 600)] == [420, 420]


@pytest.mark.parametrize("make", [tiny_native, tiny_bundle])
def test_a_device_without_states_refuses_them(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "m")
    edit_manifest(tmp_path / "m", lambda m: m["kept"][1].update(per="sequence"))
    with pytest.raises(BundleError, match=r"keeps states \(past_key_values\.0\.value\)"):
        open_cpu(Bundle(tmp_path / "m"))


def test_a_backend_that_lacks_a_layer_refuses_it_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="conv_taps is None; layers that are conv need it"):
        LLAMA.become(Lfm2, layer_types=(FULL, CONV))
    convolution = LLAMA.become(Lfm2, layer_types=(FULL, CONV), conv_taps=3)
    mixture = replace(LLAMA, experts=Experts(count=4, used=2, width=32, dense_layers=1))
    for config, lacking in ((convolution, "short_conv"), (mixture, "experts")):
        native, *others = _builds(config).items()
        native[1]()
        for medium, build in others:
            with pytest.raises(
                UnsupportedModelError, match=rf"layers\.1 .* {lacking}, .* {medium}; export it"
            ):
                build()


def _builds(config: Transformer) -> dict[str, Callable[[], object]]:
    """How each medium's decoder is made, edgespec's kernels first."""
    fixed = StaticPlan(rows=1, capacity=16, all_logits=True, int8=False, biases=False)
    return {
        "edgespec's kernels": lambda: build_native(config, native_plan(config, "Q4_0")),
        "ONNX Runtime's operators": lambda: build_decoder(config, tiny_plan(config, FLOAT)),
        "graphs of fixed shapes": lambda: build_static_decoder(config, fixed),
    }
