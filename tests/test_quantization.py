"""Quantization by choice: which matrix gets what, bundles made with it, and choices that are refused."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.gguf import GGMLType
from edgespec_export.quantization import BLOCKS, Minimums, Mixed, Quantization
from edgespec_models.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_models.weight_format import Method
from tests.gguf_for_tests import tiny_gguf
from tests.test_export import logits_error

CHOICES = st.builds(
    Quantization,
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from(BLOCKS),
    method=st.sampled_from(get_args(Method)),
    mixed=st.sampled_from(get_args(Mixed)),
    minimums=st.sampled_from(get_args(Minimums)),
)


@given(CHOICES)
def test_a_name_says_it_all(choice: Quantization) -> None:
    again = Quantization.parse(choice.name)
    assert again.name == choice.name
    for name in ("lm_head", "layers.0.down", "layers.3.v", "layers.4.q"):
        assert again.format_of(name, GGMLType.F16, 576, 12) == choice.format_of(name, GGMLType.F16, 576, 12)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bits": 5}, "bits=5 is not offered; allowed: 4, 8"),
        ({"block": 48}, "allowed: 16, 32, 64, 128"),
        ({"method": "awq"}, "keep, rtn, fit, k-quant, hqq"),
        ({"mixed": "all"}, "none, head, sensitive"),
        ({"minimums": "float"}, "columns, integer, none"),
    ],
)
def test_what_is_not_offered_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Quantization(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["", "4", "close", "4/32", "four/32/fit", "4/32/fit/colour=red", "4/32/fit/x", "²/32/fit"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(RequestError):
        Quantization.parse(name)


@pytest.mark.parametrize(
    ("columns", "block", "gets"),
    [(576, 128, 64), (576, 32, 32), (48, 64, 16), (1536, 128, 128), (40, 32, None)],
)
def test_a_width_without_whole_blocks_takes_a_smaller_block(
    columns: int, block: int, gets: int | None
) -> None:
    form = Quantization(block=block).format_of("layers.0.q", GGMLType.F16, columns, 2)
    assert (form.bits, form.block) == ((32, 32) if gets is None else (4, gets))


def test_mixed_spares_what_it_says() -> None:
    def spared(mixed: Mixed, name: str) -> bool:
        return Quantization(mixed=mixed).format_of(name, GGMLType.F16, 1024, 16).bits == 8

    assert [spared(mixed, "lm_head") for mixed in ("none", "head", "sensitive")] == [False, True, True]
    for name in ("v", "down"):
        of_layers = [spared("sensitive", f"layers.{layer}.{name}") for layer in range(16)]
        assert of_layers[:5] == [True, True, False, False, True] and of_layers[-2:] == [True, True]
        assert sum(of_layers) == 8
        assert not any(spared("head", f"layers.{layer}.{name}") for layer in range(16))
    assert not spared("sensitive", "layers.0.q") and not spared("sensitive", "layers.15.gate")


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("block", BLOCKS)
def test_a_bundle_of_every_method_and_block(tmp_path: Path, method: Method, block: int) -> None:
    model = tiny_gguf("llama", "F16")
    choice = Quantization(block=block, method=method, mixed="sensitive")
    report = export_model(
        model.write(tmp_path / "m.gguf"), tmp_path / "out", options=ExportOptions(quantization=choice)
    )
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.weights == choice.name
    assert set(manifest.formats) == {f"int4/{block}z+columns", f"int8/{block}"}
    assert {loss.method for loss in report.weights} == {method}
    assert manifest.even_rows == (block > 32)
    assert report.row_exact
    assert logits_error(model, tmp_path / "out") < 0.4  # random weights in 4 bits, through every layer


@pytest.mark.parametrize("minimums", get_args(Minimums))
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_a_bundle_of_every_way_to_hold_minimums(
    tmp_path: Path, architecture: str, minimums: Minimums
) -> None:
    model = tiny_gguf(architecture, "Q4_K")
    options = ExportOptions(quantization=Quantization(minimums=minimums, method="k-quant"))
    report = export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out", options=options)
    assert report.row_exact
    assert logits_error(model, tmp_path / "out") < 0.4


def test_keep_keeps_what_the_file_holds(tmp_path: Path) -> None:
    for kind, choice in (
        ("Q4_0", Quantization(method="keep", mixed="none")),
        ("Q8_0", Quantization(bits=8, method="keep")),
    ):
        source = tiny_gguf("llama", kind).write(tmp_path / f"{kind}.gguf")
        options = ExportOptions(quantization=choice, overwrite=True)
        report = export_model(source, tmp_path / "out", options=options)
        assert [loss.relative_error for loss in report.weights] == [0.0]
        other = ExportOptions(quantization=Quantization(bits=choice.bits, method="k-quant"), overwrite=True)
        report = export_model(source, tmp_path / "out", options=other)
        assert all(loss.relative_error > 0 for loss in report.weights)


def test_keep_does_not_drop_minimums(tmp_path: Path) -> None:
    """Rounding those of finished codes broke models; the codes are fitted anew."""
    source = tiny_gguf("llama", "Q4_1").write(tmp_path / "m.gguf")
    for minimums in ("integer", "none"):
        options = ExportOptions(
            quantization=Quantization(method="keep", mixed="none", minimums=minimums), overwrite=True
        )
        report = export_model(source, tmp_path / "out", options=options)
        assert report.weights[0].relative_error < 0.11


def test_eight_bits_are_near_the_file(tmp_path: Path) -> None:
    model = tiny_gguf("llama", "F16")
    for method in get_args(Method):
        options = ExportOptions(quantization=Quantization(bits=8, method=method), overwrite=True)
        export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out", options=options)
        assert logits_error(model, tmp_path / "out") < 0.06


def test_a_policy_and_a_quantization_exclude_each_other(tmp_path: Path) -> None:
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    options = ExportOptions(weights="close", quantization=Quantization())
    with pytest.raises(RequestError, match=r"'close' and quantization '4/32/fit' exclude each other"):
        export_model(source, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
