"""Whole tiny bundles of every family, head, source and form, and digests of what their files hold.

Left out is what may differ without another bundle: reports (seconds, memory), provenance, the manifest's
version, and names in graphs that no session reads, because libraries choose these. Nothing here hangs on the
machine: weights have seven bits, so sums are exact in any order; the tokenizer is written by hand; and no
pass runs: those that calibrate return made-up values, because ONNX Runtime's last bits differ by instruction
set, and checks, which change no bundle, are left out.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import onnx

from edgespec_export import graph_bundle
from edgespec_export.devices import device_bundle, static_export
from edgespec_export.devices.static_export import StaticPieces
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats import plan
from edgespec_export.formats.quantization import Quantization
from edgespec_export.graphs.ranges import ActivationRanges
from edgespec_models.bundles.bundle import MANIFEST, REPORT, TOKENIZER, Bundle
from edgespec_models.bundles.static_graphs import VERIFY_ROWS, ExportDevice
from edgespec_models.graphs.static_decoder import build_static_decoder
from tests.kit import assistants, block_heads, golden_heads, mtp, seeing, seeing_lfm2, seeing_qwen
from tests.kit.gguf import BLOCKS_OF_256, FORMATS, TinyGGUF, random_raw, tiny_gguf
from tests.kit.gguf_cases import GGUF_CASES, gguf_of
from tests.kit.hf import CASES, PLAIN, PORTABLE, VOCAB, config_of, weights, write_directory
from tests.kit.tokenizers import gguf_metadata

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\n"
CALIBRATION = ("the end of the tale is that one ate the tea", "ten notes on a seat in the east and a stone")
ROUNDED = "weights are rounded by sums that are not exact, so their last bits differ by instruction set"
WEIGHTS = "model.onnx.data"
_READ = re.compile(r"layers\.\d+\.stream")
"""Values within a graph that sessions ask for."""
_SHAPE = (1, 2, 4, 8)
"""Of made-up values at points of a graph: heads, elements and rows, for keys."""
Digests = Mapping[str, str]
Write = Callable[[Path], tuple[Path, Path | None]]
"""Writes a source, and a head's target, into a folder."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A bundle to make.

    ``verify`` are widths of graphs for NPUs, which take half a second each. ``left_out`` has the files
    without a digest, each with the reason.
    """

    write: Write
    options: ExportOptions = ExportOptions()  # noqa: RUF009 - it is frozen
    left_out: Mapping[str, str] | None = None
    verify: tuple[int, ...] = (1,)

    @property
    def device(self) -> ExportDevice | None:
        """Whose recipe this is."""
        return self.options.device

    def digests(self, folder: Path) -> dict[str, str]:
        """Of the ``source``, and of each file of the bundle, in ``folder``, which is empty."""
        sources = folder / "sources"
        sources.mkdir()
        source, target = self.write(sources)
        given = sorted(file for file in sources.rglob("*") if file.is_file())
        found = {"source": _short(b"".join(file.read_bytes() for file in given))}
        calibration, out = folder / "calibration.jsonl", folder / "bundle"
        calibration.write_text("\n".join(json.dumps({"text": text}) for text in CALIBRATION))
        options = replace(self.options, target=target, calibration=(calibration,))
        with _without_passes(self):
            export_model(source, out, options=options)
        for name in sorted({MANIFEST, *Bundle(out).manifest.files} - {REPORT} - (self.left_out or {}).keys()):
            found[name] = _short(_contents(out / name))
        if self.options == ExportOptions():
            found["weights of a large model"] = str(plan._LARGE)
        return found


def _short(contents: bytes) -> str:
    return sha256(contents).hexdigest()[:12]


def _contents(file: Path) -> bytes:
    if file.name == MANIFEST:
        stated = json.loads(file.read_bytes())
        for key in ("provenance", "files", "sha256", "format_version"):
            del stated[key]
        return json.dumps(stated, sort_keys=True).encode()
    return _graph(file) if file.suffix == ".onnx" else file.read_bytes()


def _graph(file: Path) -> bytes:
    """What a graph computes, with numbers for names that no session reads."""
    model = onnx.load(str(file), load_external_data=False)
    graph = model.graph
    read = {value.name for value in (*graph.input, *graph.output)}
    read |= {value.name for value in graph.initializer if value.external_data}
    numbers: dict[str, str] = {"": ""}

    def renamed(name: str) -> str:
        return name if name in read or _READ.fullmatch(name) else numbers.setdefault(name, f"{len(numbers)}")

    for node in graph.node:
        node.input[:], node.output[:] = map(renamed, node.input), map(renamed, node.output)
        for field in ("name", "metadata_props", "doc_string"):
            node.ClearField(field)
    for value in graph.initializer:
        value.name = renamed(value.name)
    for message, fields in (
        (model, ("ir_version", "producer_name", "producer_version", "metadata_props")),
        (graph, ("name", "value_info", "metadata_props")),
    ):
        for field in fields:
            message.ClearField(field)
    return bytes(model.SerializeToString(deterministic=True))


@contextmanager
def _without_passes(whole: Whole) -> Iterator[None]:
    """Exports whose passes return values that hang on names and shapes only."""

    def run(self: StaticPieces, texts: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        for parts in self.pieces:
            (self.folder / WEIGHTS).touch()
            values: dict[str, tuple[int, ...]] = {"logits": (1, self.plan.rows, self.config.vocab_size)}
            if self.plan.watched and whole.device == "npu-qnn":  # others have no ranges of activations
                graph = build_static_decoder(self.config, replace(self.plan, parts=parts)).graph
                values |= {str(value.name): _SHAPE for value in graph.outputs if ":" in str(value.name)}
            for index in range(len(texts)):
                yield index, {name: _made_up(name, shape) for name, shape in values.items()}

    model = SimpleNamespace(row_exact=True)
    session = SimpleNamespace(close=lambda: None, self_test=lambda: True, model=model)
    instead: tuple[tuple[Any, str, Any], ...] = (
        (StaticPieces, "run", run),
        (device_bundle, "open_static", lambda *opened: session),
        (graph_bundle, "open_cpu", lambda *opened: session),
        (graph_bundle, "_measure_rounding", lambda *compared: None),
        (graph_bundle, "run_pieces", lambda *pieces: (True, True, ())),
        (static_export, "VERIFY_ROWS", whole.verify),
        (graph_bundle, "measure_ranges", lambda *measured: ActivationRanges(1.0, 1.0, 1)),
    )
    with ExitStack() as stack:
        for place, name, made_up in instead:
            stack.enter_context(mock.patch.object(place, name, made_up))
        yield


def _made_up(name: str, shape: tuple[int, ...]) -> Any:
    largest = np.float32(1 + crc32(name.encode()) % 15)
    return np.resize(np.array([-largest, -1, 0.5, largest / 2], np.float32), shape)


# ---- Sources -----------------------------------------------------------------------------------------------


def tokenizer_json(size: int) -> str:
    """A byte-level BPE tokenizer of ``size`` tokens, without the library's help."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in plain] + [chr(256 + number) for number in range(256 - len(plain))]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [[first, second] for first in "etaoinsrhdlu" for second in "etaoinsrhdlu"]
    texts = [*special, *letters, *map("".join, merges)][: size - 1]
    added = [(id_, text, True) for id_, text in enumerate(special)] + [(size - 1, "<tool>", False)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": id_, "content": text, **flags, "special": special} for id_, text, special in added
            ],
            "normalizer": None,
            "pre_tokenizer": cut,
            "post_processor": None,
            "decoder": cut,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {text: id_ for id_, text in enumerate(texts)},
                "merges": merges[: len(texts) - 256 - len(special)],
            },
        },
        ensure_ascii=False,
    )


def _with_texts(folder: Path) -> Path:
    """A directory whose tokenizer and template are those of this module."""
    (folder / TOKENIZER).write_text(tokenizer_json(VOCAB), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def _write_file(model: TinyGGUF, path: Path) -> Path:
    """A file whose tokenizer and template are those of this module."""
    tokens: Any = model.metadata["tokenizer.ggml.tokens"]
    model.metadata |= gguf_metadata(tokenizer_json(len(tokens))) | {"tokenizer.chat_template": TEMPLATE}
    return model.write(path)


def _directory(case: str, folder: Path) -> tuple[Path, None]:
    facts = config_of(case)
    if case == "ministral3":  # graphs that know no positions end there, and NPUs take 64 tokens at least
        facts["rope_parameters"] |= {"original_max_position_embeddings": 64}
    return _with_texts(write_directory(folder / "m", facts, weights(facts))), None


def _directory_with_outliers(folder: Path) -> tuple[Path, None]:
    """A Llama with a large weight in each block, so that a rounding of less than its range is nearer."""
    facts = config_of("llama")
    tensors = weights(facts)
    for values in (values for values in tensors.values() if values.ndim == 2):
        step = np.abs(values[values != 0]).min()  # seven bits stay seven bits
        small = np.trunc(values / (4 * step)) * step
        values[:] = np.where(np.arange(values.shape[1]) % 32, small, values)
    return _with_texts(write_directory(folder / "m", facts, tensors)), None


def _file(make: Callable[[], TinyGGUF], folder: Path) -> tuple[Path, None]:
    return _write_file(make(), folder / "m.gguf"), None


def _in_formats(first: int) -> TinyGGUF:
    """A Llama of one layer whose matrices are in one format after another."""
    model, kinds = tiny_gguf("llama", layers=1), [*FORMATS[first:], *FORMATS[:first]]
    matrices = [name for name, (_, raw) in model.tensors.items() if raw.ndim == 2]
    for name, kind in zip(matrices, kinds, strict=False):
        rows, columns = model.tensors[name][1].shape
        form = kind if columns % 256 == 0 or kind not in BLOCKS_OF_256 else "Q8_0"
        model.tensors[name] = form, random_raw(np.random.default_rng(len(name)), rows, columns, form)
    return model


def _head_directory(target: Callable[[Path], Path], head: Callable[[Path], Path], folder: Path) -> Any:
    return head(folder / "head"), _with_texts(target(folder / "m"))


def _head_file(target: Callable[[], TinyGGUF], head: Callable[[], TinyGGUF], folder: Path) -> Any:
    return _write_file(head(), folder / "head.gguf"), _write_file(target(), folder / "m.gguf")


def _block_head(folder: Path, **kind: bool) -> Path:
    return write_directory(folder, block_heads.config(**kind), block_heads.tensors(**kind))


def _speculators(chained: bool, folder: Path) -> Path:
    """A head that drafts every other token, by the tensors of its target's LM head."""
    rows = np.arange(3, VOCAB, 2)
    values: dict[str, Any] = block_heads.tensors(chained=chained)
    of_target = block_heads.target_tensors(block_heads.target_config())
    values["lm_head.weight"] = of_target["lm_head.weight"][rows]
    if chained:
        values["markov_head.markov_w2.weight"] = values["markov_head.markov_w2.weight"][rows]
        del values["confidence_head.proj.bias"]
    values |= {"d2t": rows - np.arange(len(rows)), "t2d": np.isin(np.arange(VOCAB), rows)}
    return write_directory(folder, block_heads.speculators(len(rows), chained=chained), values)


def _seeing_qwen(folder: Path) -> tuple[Path, None]:
    return _with_texts(seeing_qwen.write(folder / "m")), None


def _layer_that_sees(folder: Path) -> Any:
    source = _with_texts(seeing_qwen.write(folder / "m", mtp=True))
    return source, source


def _seeing(kind: str, folder: Path) -> tuple[Path, None]:
    return _with_texts(seeing.write(folder / "m", kind)), None


def _seeing_in_tiles(folder: Path) -> tuple[Path, None]:
    return seeing_lfm2.write(folder / "m"), None


def _layer_of_directory(case: str, folder: Path) -> Any:
    source = _with_texts(mtp.write_hf(folder / "m", case=case))
    return source, source


def _layer_of_file(case: str, folder: Path) -> Any:
    source = _write_file(mtp.gguf(case=case), folder / "m.gguf")
    return source, source


# ---- Bundles -----------------------------------------------------------------------------------------------

DRAFTS = ExportOptions(role="drafter")
PORTABLE_WEIGHTS = ExportOptions(weights="portable")
DEVICES: Mapping[str, ExportOptions] = {
    "cuda": ExportOptions(device="cuda"),
    "npu-openvino": ExportOptions(device="npu-openvino", buckets=(64,)),
    "npu-qnn": ExportOptions(device="npu-qnn", buckets=(64,)),
}


def _families() -> dict[str, Whole]:
    bundles = {f"{case}/directory": Whole(partial(_directory, case)) for case in CASES}
    for case in GGUF_CASES:
        bundles[f"{case}/file"] = Whole(partial(_file, partial(gguf_of, case, "Q8_0")))
    for case in PORTABLE:
        bundles[f"{case}/directory/portable"] = Whole(partial(_directory, case), PORTABLE_WEIGHTS)
    for device, cases in (("cuda", PORTABLE), ("npu-openvino", PLAIN)):
        first = {config_of(case)["model_type"]: case for case in reversed(cases)}  # of each family
        for case in sorted(first.values()):
            bundles[f"{case}/directory/{device}"] = Whole(partial(_directory, case), DEVICES[device])
    bundles |= {f"gemma4 that sees/{kind}": Whole(partial(_seeing, kind)) for kind in seeing.KINDS}
    bundles["lfm2 that sees"] = Whole(_seeing_in_tiles)
    every_width = replace(bundles["llama/directory/npu-openvino"], verify=VERIFY_ROWS)
    bundles["llama/directory/npu-openvino"] = every_width
    file = partial(_file, partial(gguf_of, "qwen2", "Q8_0"))
    bundles["qwen2/file/portable"] = Whole(file, PORTABLE_WEIGHTS)
    bundles["qwen35 that sees"] = Whole(_seeing_qwen)
    bundles["qwen35 that sees/layer"] = Whole(_layer_that_sees, DRAFTS)
    bundles["qwen2/file/npu-qnn"] = Whole(file, DEVICES["npu-qnn"])  # with biases
    windowed = partial(_directory, "gemma3")
    bundles["gemma3/directory/npu-qnn"] = Whole(windowed, DEVICES["npu-qnn"])  # and norms everywhere
    return bundles


def _formats() -> dict[str, Whole]:
    bundles = {}
    for number in range(len(FORMATS) // 8 + 1):
        write = partial(_file, partial(_in_formats, 8 * number))
        bundles[f"llama in formats from {FORMATS[8 * number]}"] = Whole(write)
        portable = Whole(write, PORTABLE_WEIGHTS, {WEIGHTS: ROUNDED})
        bundles[f"llama in formats from {FORMATS[8 * number]}/portable"] = portable
    for name, quantization in (
        ("8 bits", Quantization(8)),
        ("4 bits", Quantization(4)),
        ("4 bits, mixed", Quantization(4, "sensitive")),
    ):
        for form, kind in (("", None), ("/portable", "portable")):
            options = ExportOptions(quantization=quantization, weights=kind)
            bundles[f"llama rounded to {name}{form}"] = Whole(_directory_with_outliers, options)
    return bundles


def _drafters() -> dict[str, Whole]:
    bundles = {}
    write = partial(_file, partial(gguf_of, "llama", "Q8_0"))
    for name, options in (
        ("", replace(DRAFTS, trim=264)),
        ("/portable", replace(DRAFTS, weights="portable", trim="full")),
        ("/cuda", replace(DRAFTS, device="cuda", trim=264)),
    ):
        bundles[f"llama as a drafter{name}"] = Whole(write, options)
    for case in golden_heads.CASES:
        target, head = (partial(at, case=case) for at in (golden_heads.write_target, golden_heads.write_head))
        bundles[f"EAGLE-3 of {case}/directory"] = Whole(partial(_head_directory, target, head), DRAFTS)
        files = partial(golden_heads.target_gguf, case), partial(golden_heads.head_gguf, case)
        bundles[f"EAGLE-3 of {case}/file"] = Whole(partial(_head_file, *files), DRAFTS)
    heads: dict[str, dict[str, Any]] = {
        "DFlash": {},
        "DFlash 2": {"second": True},
        "DSpark": {"chained": True},
    }
    for name, kind in heads.items():
        write = partial(_head_directory, block_heads.write_target, partial(_block_head, **kind))
        bundles[f"{name}/directory"] = Whole(write, DRAFTS)
        write = partial(_head_file, block_heads.target_gguf, partial(block_heads.gguf, **kind))
        bundles[f"{name}/file"] = Whole(write, DRAFTS)
        if name != "DFlash 2":
            speculators = partial(_speculators, kind.get("chained", False))
            write = partial(_head_directory, block_heads.write_target, speculators)
            bundles[f"{name}/of speculators"] = Whole(write, DRAFTS)
    for case in ("qwen35", "qwen35_moe", "glm4_moe_lite", "nemotron_h_moe"):
        bundles[f"MTP layer of {case}/directory"] = Whole(partial(_layer_of_directory, case), DRAFTS)
        bundles[f"MTP layer of {case}/file"] = Whole(partial(_layer_of_file, case), DRAFTS)
    bundles["MTP layer of qwen35/trimmed"] = Whole(
        partial(_layer_of_file, "qwen35"), replace(DRAFTS, trim=264)
    )
    for name, clustered in (("assistant", False), ("assistant with clusters", True)):
        facts = assistants.config(clustered=clustered)
        write = partial(_head_directory, assistants.write_target, partial(assistants.write, facts=facts))
        bundles[f"{name}/directory"] = Whole(write, DRAFTS)
    bundles["assistant/file"] = Whole(partial(_head_file, assistants.target_gguf, assistants.gguf), DRAFTS)
    return bundles


BUNDLES: Mapping[str, Whole] = _families() | _formats() | _drafters()
"""Every bundle, by its name in the table."""
