"""Targets: bundles, what other exporters wrote, and the header of an ONNX graph."""

import json
import shutil
import tempfile
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from rich.console import Console

from edgespec.cli import inspect
from edgespec_models.bundles.bundle import HEAD_TOKENS, MANIFEST, REPORT, TEMPLATE, TOKENIZER, Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.foreign_graph import ForeignGraph, Stated
from edgespec_models.bundles.static_graphs import StaticGraphs
from edgespec_models.errors import BundleError, ModelFileError, TokenizerError, UnsupportedModelError
from tools.fuzz.forms import JSON, PROTOBUF
from tools.fuzz.rules import Rule, Target, only, table, untouched, write_files

__all__ = ["TARGETS"]

_SMALL = (REPORT, TEMPLATE, HEAD_TOKENS)
_CONFIGS = ("genai_config.json", "config.json", "tokenizer_config.json", "generation_config.json", TEMPLATE)
_FOREIGN = (BundleError, UnsupportedModelError, ModelFileError, TokenizerError)
_DRAFTER: Final[Any] = {"head_tokens": tuple(range(0, 300, 2)), "role": "drafter"}
_AGREEMENT: Final[Any] = {"top1_agreement": 1.0, "kl": 0.001}
_CHOICES = [{"acceptance": 0.8, "step_ms": 1.5}]
_REPORT: Final[Any] = {
    "parity": _AGREEMENT | {"by_text": {"prose": _AGREEMENT}},
    "weights": [{"relative_error": 0.01, "source": "F32", "weights": 9, "format": "int8", "method": "rtn"}],
    "trim": {"rows": 150, "of": 300, "coverage": 0.9, "acceptance": 0.7, "step_ms": 1.0, "choices": _CHOICES},
    "static": _AGREEMENT,
    "bytes": {"bundle": 9, "source": 9},
    "row_exact": True,
    "peak_memory_bytes": 9,
    "conversion_peak_memory_bytes": 9,
    "seconds": 1.5,
}
_STATIC = StaticGraphs(
    device="npu-qnn",
    verify=(1, 4),
    prefill=8,
    buckets=(16,),
    activations="uint16",
    masked=-1e4,
    wide_keys=(1,),
)
_FACTS = Stated(architecture="gpt2", vocab_size=404, num_heads=4, context_length=640)


def _use_bundle(bundle: Bundle) -> None:
    """All that is asked of a bundle before a session opens it."""
    with only(TokenizerError, names=TOKENIZER):
        assert bundle.tokenizer.vocab_size == bundle.config.vocab_size
    with only(BundleError, names=HEAD_TOKENS):
        assert bundle.head_tokens is None or len(bundle.head_tokens) == bundle.manifest.head_rows
    with only(BundleError, TokenizerError, names=bundle.path.name):
        assert bundle.chat_template is None or bundle.chat_template.arguments is not None
    with only(BundleError, names=REPORT):
        assert isinstance(bundle.report(), dict)
    manifest = bundle.manifest
    assert min(manifest.kv_bytes_per_token, manifest.bytes_per_pass, manifest.parameters_per_pass) >= 0
    json.dumps(manifest.to_json()).encode()
    assert len(bundle.digest) == 16
    assert (manifest.form, manifest.made_for, bundle.graph.parent) is not None


def _show(path: Path) -> None:
    """``edgespec inspect``, for people; it costs more than all else, so it is not done for every input."""
    console = Console(file=TextIOWrapper(BytesIO(), encoding="utf-8", errors="replace"), width=100)
    with patch.object(inspect, "output", lambda: console):
        inspect.inspect(path)


def _bundle(folder: Path) -> Rule:
    """The input has the manifest and small files; sizes of these are put right where they were of others."""
    from tests.toy import tiny_bundle

    path = tiny_bundle(folder / "fuzzed-model", **_DRAFTER).path
    for name in _STATIC.files:
        (path / name).touch()

    def rule(data: bytes) -> None:
        tree = table(data)
        write_files(path, tree, _SMALL)
        files = table(table(tree.get(MANIFEST)).get("files"))
        for name in _SMALL:
            if (
                (path / name).is_file()
                and isinstance(files.get(name), dict)
                and not files[name].get("size_bytes")
            ):
                files[name]["size_bytes"] = (path / name).stat().st_size
        write_files(path, tree, (MANIFEST,))
        with untouched(folder), only(BundleError, names=path.name):
            _use_bundle(Bundle(path, verify_digests=len(data) % 8 == 0))
            with only(BundleError, TokenizerError, names=path.name):
                if len(data) % 4 == 0:
                    _show(path)

    return rule


def _bundle_seeds() -> list[bytes]:
    from tests.toy import tiny_bundle

    small: dict[str, Any] = {REPORT: _REPORT, TEMPLATE: "{{ messages[0].content }}"}
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_bundle(Path(folder) / "m", **_DRAFTER).path
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        small[HEAD_TOKENS] = (path / HEAD_TOKENS).read_bytes().decode("latin-1")
    sizes = {name: {"size_bytes": 0, "sha256": "0" * 64} for name in (*_SMALL, *_STATIC.files)}
    whole = manifest | {"head_rows": None, "static": _STATIC.to_json(), "kv": "uint8", "float_kv_layers": [0]}
    return [
        JSON.write({MANIFEST: each | {"files": manifest["files"] | sizes}, **small})
        for each in (manifest, whole)
    ]


def _foreign(folder: Path) -> Rule:
    """The input has the configuration files; the graph is Optimum's or the builder's."""
    from tests.foreign_for_tests import ForeignSpec, write_genai, write_optimum

    builder = write_genai(folder / "fuzzed-model", ForeignSpec(external=True))
    optimum = write_optimum(
        folder / "fuzzed-model-2", ForeignSpec(attention="concat", positions=True, external=True)
    )

    def rule(data: bytes) -> None:
        tree = table(data)
        path = builder if "genai_config.json" in tree else optimum
        write_files(path, tree, _CONFIGS)
        with untouched(folder), only(*_FOREIGN, names=path.name):
            bundle = open_bundle(path)
            with only(TokenizerError, ModelFileError, names=path.name):
                assert bundle.chat_template is None or bundle.chat_template.arguments is not None
            assert len(bundle.digest) == 16
            assert bundle.manifest.kv_bytes_per_token > 0
            assert bundle.manifest.bytes_per_pass >= 0
            json.dumps(bundle.manifest.to_json()).encode()
            with only(TokenizerError, ModelFileError, names=path.name):
                if len(data) % 4 == 0:
                    _show(path)

    return rule


def _foreign_seeds() -> list[bytes]:
    from tests.foreign_for_tests import write_genai, write_optimum

    beside: dict[str, Any] = {
        TEMPLATE: "{{ messages[0].content }}",
        "generation_config.json": {"eos_token_id": [2, 3]},
    }
    beside["tokenizer_config.json"] = {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True}
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for write, name in ((write_genai, "genai_config.json"), (write_optimum, "config.json")):
            path = write(Path(folder) / name)
            seeds.append({name: json.loads((path / name).read_text(encoding="utf-8"))} | beside)
    extra = {"sliding_window": {"window_size": 8, "slide_key_value_cache": False}, "pipeline": []}
    seeds[0]["genai_config.json"]["model"]["decoder"] |= extra
    return [JSON.write(seed) for seed in seeds]


def _onnx(folder: Path) -> Rule:
    path = folder / "model.onnx"
    (folder / "model.onnx.data").write_bytes(bytes(100))

    def rule(data: bytes) -> None:
        path.write_bytes(data)
        with untouched(folder), only(BundleError, UnsupportedModelError, names=path.name):
            graph = ForeignGraph(path, _FACTS)
            assert all(value >= 0 for value in graph.weights["bytes_by_class"].values())
            assert all(folder in file.parents for file in graph.data_files), "weights from elsewhere"

    return rule


def _onnx_seeds() -> list[bytes]:
    """Graphs whose weights lie beside them."""
    from tests.foreign_for_tests import ForeignSpec, write_genai

    specs = [
        ForeignSpec(external=True),
        ForeignSpec(attention="concat", positions=True, kv="float16", weights="int4", external=True),
    ]
    seeds = []
    for spec in specs:
        folder = Path(tempfile.mkdtemp())
        seeds.append((write_genai(folder, spec) / "model.onnx").read_bytes())
        shutil.rmtree(folder)
    return seeds


TARGETS: Final = {
    "bundle": Target(form=JSON, seeds=_bundle_seeds, rule=_bundle),
    "foreign": Target(form=JSON, seeds=_foreign_seeds, rule=_foreign),
    "onnx": Target(
        form=PROTOBUF, seeds=_onnx_seeds, rule=_onnx, words=("location", "offset", "model.onnx.data")
    ),
}
