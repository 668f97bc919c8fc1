"""Damaged and foreign files, full disks and interruptions: one clear error, and nothing left behind."""

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_export import export as export_module
from edgespec_export.export import export_model
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.open import is_head
from edgespec_models.bundles.bundle import WEIGHTS
from edgespec_models.errors import EdgespecError, ModelFileError, StorageError, TokenizerError
from edgespec_models.errors import UnsupportedModelError as Unsupported
from edgespec_models.progress import Progress
from tests.kit.gguf import HIDDEN, TinyGGUF, tiny_gguf
from tests.kit.gguf_cases import gguf_of

Edit = Callable[[TinyGGUF], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = tiny_gguf("llama", "Q4_0", layers=1)
    return model.write(tmp_path_factory.mktemp("sound") / "m.gguf").read_bytes()


def refused(folder: Path, content: bytes, kind: type[EdgespecError], match: str) -> None:
    """An export of ``content`` must fail with ``kind``, name the file, and leave nothing."""
    (folder / "m.gguf").write_bytes(content)
    with pytest.raises(kind, match=match) as caught:
        export_model(folder / "m.gguf", folder / "out")
    assert caught.type is kind
    assert "m.gguf" in str(caught.value) or kind is StorageError
    assert [path.name for path in folder.iterdir()] == ["m.gguf"]


def header_end(content: bytes, folder: Path) -> int:
    """Where the tensor data start."""
    (folder / "probe.gguf").write_bytes(content)
    with GGUFFile(folder / "probe.gguf") as file:
        start = min(tensor.offset for tensor in file.tensors.values())
    (folder / "probe.gguf").unlink()
    return start


def gguf(n_tensors: int, n_keys: int, body: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + body + bytes(64)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE, NAN = 2**63 + 5, float("nan")
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "m.gguf"),
    "wrong magic": (b"PK\3\4" + bytes(100), "GGUF"),
    "a text": (b"# Notes\n" * 10, "not b'GGUF'"),
    "absurd tensor count": (gguf(HUGE, 0), "tensors"),
    "absurd key count": (gguf(0, HUGE), "keys"),
    "absurd key length": (gguf(0, 1, struct.pack("<Q", HUGE)), "metadata key"),
    "absurd text length": (gguf(0, 1, key(b"k", 8, struct.pack("<Q", HUGE))), "needs"),
    "absurd array length": (gguf(0, 1, key(b"k", 9, struct.pack("<IQ", 4, HUGE))), "needs"),
    "absurd text array": (gguf(0, 1, key(b"k", 9, struct.pack("<IQ", 8, HUGE))), "needs"),
    "unknown value type": (gguf(0, 1, key(b"k", 99, b"")), "unknown type 99"),
    "arrays nested deeply": (gguf(0, 1, key(b"k", 9, struct.pack("<IQ", 9, 1) * 5)), "nested"),
    "duplicate key": (gguf(0, 2, key(b"k", 0, b"\1") * 2), "twice"),
    "duplicate tensor": (gguf(2, 0, tensor(b"t", (8,), 0, 0) * 2), "twice"),
    "no dimensions": (gguf(1, 0, tensor(b"t", (), 0, 0)), "0 dimensions"),
    "five dimensions": (gguf(1, 0, tensor(b"t", (1,) * 5, 0, 0)), "5 dimensions"),
    "an empty dimension": (gguf(1, 0, tensor(b"t", (0,), 0, 0)), "shape"),
    "half a block": (gguf(1, 0, tensor(b"t", (16,), 2, 0)), "Q4_0"),
    "absurd shape": (gguf(1, 0, tensor(b"t", (2**62, 2**62), 0, 0)), "truncated"),
    "offset beyond the file": (gguf(1, 0, tensor(b"t", (8,), 0, 1 << 40)), "truncated"),
    "offset off the alignment": (gguf(1, 0, tensor(b"t", (1,), 0, 7)), "multiple of 32"),
    "alignment of zero": (gguf(0, 1, key(b"general.alignment", 4, bytes(4))), "alignment"),
    "alignment that is a text": (gguf(0, 1, key(b"general.alignment", 8, text(b"32"))), "alignment"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files(tmp_path: Path, name: str) -> None:
    content, match = MALFORMED[name]
    refused(tmp_path, content, ModelFileError, match)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000, 2**32 - 1])
def test_other_versions(tmp_path: Path, version: int) -> None:
    match = "big-endian" if version == 0x03000000 else f"version {version};"
    refused(tmp_path, gguf(0, 0, version=version), Unsupported, match)


def test_an_architecture_that_is_an_array(tmp_path: Path) -> None:
    content = gguf(0, 1, key(b"general.architecture", 9, struct.pack("<IQ2I", 4, 2, 7, 7)))
    refused(tmp_path, content, Unsupported, r"'\[7 7\]'")
    assert not is_head(tmp_path / "m.gguf")


def test_truncated_anywhere(tmp_path: Path, sound: bytes) -> None:
    start = header_end(sound, tmp_path)
    cuts = {*range(24), *range(24, start, 997), start - 1, start, start + 1, len(sound) // 2, len(sound) - 33}
    for cut in sorted(cuts):
        refused(tmp_path, sound[:cut], ModelFileError, r"m\.gguf")


def put(name: str, value: object, of: str = "llama.") -> Edit:
    return lambda model: model.metadata.update({of + name: value})


def say(name: str, value: object) -> Edit:
    return put(name, value, "tokenizer.")


def wide(name: str) -> Edit:
    return lambda model: model.tensors.update({name: ("F32", np.zeros((7, HIDDEN), np.float32))})


def foreign(model: TinyGGUF) -> None:
    model.architecture = "mamba"
    model.tensors["blk.0.ssm_in.weight"] = model.tensors.pop("output.weight")


def heads_of(keys: int, values: int) -> Edit:
    facts = {"llama.attention.key_length": keys, "llama.attention.value_length": values}
    return lambda model: model.metadata.update(facts)


def scaled(kind: str, factor: float = 8.0, **more: float) -> Edit:
    facts = {"type": kind, "factor": factor, **more}
    return lambda model: model.metadata.update({f"llama.rope.scaling.{k}": v for k, v in facts.items()})


def scaled_twice(model: TinyGGUF) -> None:
    scaled("linear")(model)
    model.tensors["rope_freqs.weight"] = ("F32", np.ones(16, np.float32))


def stacked(model: TinyGGUF) -> None:
    for which in "qkv":
        del model.tensors[f"blk.0.attn_{which}.weight"]
    wide("blk.0.attn_qkv.weight")(model)


def family(architecture: str) -> Edit:
    def edit(model: TinyGGUF) -> None:
        model.architecture = architecture

    return edit


FOREIGN: dict[str, tuple[Edit, type[EdgespecError], str]] = {
    "unknown architecture": (family("mamba"), Unsupported, "mamba"),
    "foreign tensors and architecture": (foreign, Unsupported, "mamba"),
    "missing tensor": (lambda m: m.tensors.pop("blk.0.ffn_up.weight"), ModelFileError, r"layers\.0\.up"),
    "no embedding": (lambda m: m.tensors.pop("token_embd.weight"), ModelFileError, "embedding"),
    "wrong shape": (wide("blk.0.ffn_up.weight"), ModelFileError, r"\(7, 256\)"),
    "surplus tensor": (wide("blk.0.ffn_gate_exps.weight"), Unsupported, "ffn_gate_exps"),
    "surplus layer": (wide("blk.7.ffn_up.weight"), Unsupported, r"blk\.7"),
    "the same layer twice": (wide("blk.00.ffn_up.weight"), Unsupported, r"blk\.00"),
    "a layer of many digits": (wide(f"blk.{'1' * 50}.ffn_up.weight"), Unsupported, "1111"),
    "a context for no pass": (put("context_length", 3), Unsupported, "context_length is 3"),
    "merges of other tokens": (say("ggml.merges", ["a b c"]), ModelFileError, "Merge 0"),
    "a pre-tokenizer of its own": (say("ggml.pre", "martian"), Unsupported, "'martian' is not known"),
    "an end of text that is no token": (say("ggml.eos_token_id", "2"), ModelFileError, "eos_token_id"),
    "key missing": (lambda m: m.metadata.pop("llama.block_count"), ModelFileError, "block_count"),
    "key of a wrong type": (put("block_count", "two"), ModelFileError, "block_count"),
    "key that is a list": (put("attention.head_count_kv", [2, 1]), ModelFileError, "head_count_kv"),
    "absurd layer count": (put("block_count", 2**31 - 1), Unsupported, "says 2147483647 layers"),
    "no layers": (put("block_count", 0), Unsupported, "says 0 layers"),
    "no heads": (put("attention.head_count", 0), Unsupported, "num_heads is 0"),
    "heads of no width": (heads_of(0, 0), Unsupported, "0 elements a head"),
    "heads that do not divide": (put("attention.head_count_kv", 3), Unsupported, r"m\.gguf: .*3 key-value"),
    "absurd context": (put("context_length", 2**31 - 1), Unsupported, "context_length"),
    "no context": (put("context_length", 0), Unsupported, "context_length"),
    "epsilon not a number": (put("attention.layer_norm_rms_epsilon", NAN), ModelFileError, "epsilon is nan"),
    "rope base of zero": (put("rope.freq_base", 0.0), ModelFileError, "rope.freq_base is 0.0"),
    "rope scaled in an unknown way": (scaled("ntk"), Unsupported, "'ntk'.*yarn"),
    "yarn that shrinks": (scaled("yarn", -2.0), ModelFileError, r"rope\.scaling\.factor is -2\.0"),
    "yarn between no turns": (
        scaled("yarn", yarn_beta_fast=1.0, yarn_beta_slow=32.0),
        ModelFileError,
        r"beta_fast is 1\.0; it must exceed beta_slow, 32\.0",
    ),
    "long factors alone": (wide("rope_factors_long.weight"), ModelFileError, "lacks 'short_factor'"),
    "an encoder": (put("attention.causal", False), Unsupported, "it encodes texts and writes none"),
    "yarn mixed otherwise": (put("rope.scaling.yarn_ext_factor", 0.5), Unsupported, "ext_factor is 0.5"),
    "factors beside a scaling": (scaled("linear", attn_factor=1.2), Unsupported, "factor is 1.2.*linear"),
    "a scaling twice": (scaled_twice, ModelFileError, "rope_freqs"),
    "factors of another width": (wide("rope_freqs.weight"), Unsupported, r"m\.gguf: .*rope_factors"),
    "experts": (put("expert_count", 8), Unsupported, "expert_count is 8.*dense"),
    "experts of a known family": (
        family("qwen2moe"),
        Unsupported,
        "'qwen2moe'.*needs experts in this family's form.*use Qwen3-30B-A3B instead",
    ),
    "another vocabulary than the embedding's": (put("vocab_size", 7), ModelFileError, "7 tokens.* rows"),
    "values wider than keys": (heads_of(32, 64), Unsupported, "values 64 wide and keys 32 wide"),
    "a missing norm": (lambda m: m.tensors.pop("blk.0.attn_norm.weight"), ModelFileError, "attn_norm"),
    "queries twice": (wide("blk.0.attn_qkv.weight"), ModelFileError, "attn_qkv.*attn_k"),
    "stacked rows that are others": (stacked, ModelFileError, r"\(7, 256\).*\(256, 256\)"),
    "part of a head rotated": (
        put("rope.dimension_count", 16),
        Unsupported,
        "rotates 16 of the 32 elements of a head",
    ),
    "no tokenizer": (lambda m: m.metadata.pop("tokenizer.ggml.tokens"), ModelFileError, "tokens"),
    "unknown tokenizer": (say("ggml.model", "bert"), Unsupported, "bert"),
    "a template that is no Jinja": (say("chat_template", "{% for %}"), TokenizerError, "template"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_that_describe_something_else(tmp_path: Path, name: str) -> None:
    edit, kind, match = FOREIGN[name]
    model = tiny_gguf("llama", layers=1)
    edit(model)
    content = model.write(tmp_path / "m.gguf").read_bytes()
    refused(tmp_path, content, kind, match)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"attention.head_count_kv": [0, 0, 2, 0]}, Unsupported, "attention or convolution for each of 5"),
        ({"attention.head_count_kv": [0, 0, 2, 0, 4]}, ModelFileError, "head_count_kv is .* not a whole"),
        ({"attention.head_count_kv": [0] * 5}, Unsupported, "num_kv_heads is 0"),
        ({"attention.head_count_kv": ["a"] * 5}, ModelFileError, "head_count_kv is .* not a whole"),
        ({"attention.head_count_kv": [0, 0, 0, 0, 2]}, ModelFileError, r"lacks a tensor for layers\.2\.conv"),
        ({"attention.head_count_kv": 2}, ModelFileError, r"lacks a tensor for layers\.0\.q"),
        ({"attention.head_count": 8}, ModelFileError, r"attn_k.*\(32, 64\).*\(16, 64\)"),
        ({"shortconv.l_cache": 4}, ModelFileError, r"shortconv\.conv.*\(64, 3\).*\(64, 4\)"),
        ({"shortconv.l_cache": 0}, Unsupported, "conv_taps is 0"),
        ({"shortconv.l_cache": 1 << 31}, Unsupported, "conv_taps is 2147483648"),
        ({"block_count": 4}, Unsupported, "attention or convolution for each of 4"),
    ],
)
def test_convolutions_that_contradict_each_other(
    tmp_path: Path, change: dict[str, object], kind: type[EdgespecError], match: str
) -> None:
    model = gguf_of("lfm2", "Q8_0")
    model.metadata |= {f"lfm2.{key}": value for key, value in change.items()}
    refused(tmp_path, model.write(tmp_path / "m.gguf").read_bytes(), kind, match)


@pytest.mark.parametrize(
    ("name", "size", "instead"),
    [
        ("IQ1_S", 50, "IQ2_XXS"),
        ("TQ1_0", 54, "Q2_K"),
        ("TQ2_0", 66, "Q2_K"),
        ("I32", 1024, "Q4_K_M or Q8_0"),
    ],
)
def test_weight_formats_that_are_not_read(tmp_path: Path, name: str, size: int, instead: str) -> None:
    model = tiny_gguf("llama", layers=1)
    model.tensors["blk.0.ffn_up.weight"] = (name, np.zeros((HIDDEN, size), np.uint8))
    content = model.write(tmp_path / "m.gguf").read_bytes()
    number = {"I32": "number 26"}.get(name, name)
    refused(tmp_path, content, Unsupported, f"weight format {number};.*IQ4_XS.* such as {instead}")


def test_texts_types_and_sizes_that_cannot_be(tmp_path: Path) -> None:
    model = tiny_gguf("llama", layers=1)
    model.metadata["tokenizer.chat_template"] = "hello there"
    content = model.write(tmp_path / "m.gguf").read_bytes().replace(b"hello there", b"hello\xffthere")
    refused(tmp_path, content, ModelFileError, r"chat_template\.jinja.*not valid UTF-8")
    model = tiny_gguf("llama", layers=1)
    for name in ("token_embd.weight", "output.weight"):  # fewer rows than the tokenizer has ids
        model.tensors[name] = ("F32", model.values(name)[:-9].copy())
    content = model.write(tmp_path / "m.gguf").read_bytes()
    refused(tmp_path, content, TokenizerError, "390 tokens, but the embedding 381 rows")


@pytest.mark.parametrize("name", ["chat_template", "chat_template.tool_use"])
def test_a_template_that_is_no_jinja_is_refused_before_weights_are_written(tmp_path: Path, name: str) -> None:
    model, seen = tiny_gguf("llama", layers=1), set[str]()
    say("chat_template", "{{ messages }}")(model)
    say(name, "{% for %}")(model)
    source = model.write(tmp_path / "m.gguf")
    with pytest.raises(TokenizerError, match=r"m\.gguf.*template is not valid"):
        export_model(source, tmp_path / "out", progress=lambda step: seen.add(step.stage))
    assert "Exporting" not in seen


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_K", "MXFP4"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_that_are_not_finite(tmp_path: Path, kind: str, weights: str) -> None:
    options = export_module.ExportOptions(weights=weights)
    for number, name in enumerate(("ffn_up", "attn_norm")):
        model = tiny_gguf("llama", kind, layers=1)
        raw = model.tensors[f"blk.0.{name}.weight"][1].view(np.uint8)
        raw[..., :4] = 0xFF
        folder = tmp_path / str(number)
        folder.mkdir()
        source = model.write(folder / "m.gguf")
        with pytest.raises(ModelFileError, match=rf"blk\.0\.{name}\.weight.*not finite"):
            export_model(source, folder / "out", options=options)
        assert [path.name for path in folder.iterdir()] == ["m.gguf"]


def test_random_damage_to_facts_and_weights(tmp_path: Path, sound: bytes) -> None:
    """Whole exports, with most changes among the facts: a documented error or success, and never a hang."""
    rng = np.random.default_rng(1)
    facts, end = sound.index(b"tokenizer.ggml"), len(sound)
    (tmp_path / "work").mkdir()
    outcomes = set()
    for number in range(60):
        content = bytearray(sound)
        for at in rng.integers(0, facts if number % 3 else end, 3):
            content[at] = rng.integers(256)
        (tmp_path / "m.gguf").write_bytes(content)
        out = tmp_path / "work" / "out"
        try:
            export_model(tmp_path / "m.gguf", out, options=export_module.ExportOptions(overwrite=True))
            outcomes.add("success")
        except (ModelFileError, Unsupported, TokenizerError) as error:
            assert "m.gguf" in str(error)
            outcomes.add("error")
        assert {path.name for path in out.parent.iterdir()} <= {"out"}
    assert outcomes == {"success", "error"}


@pytest.mark.parametrize("stage", ["Reading", "Exporting", "Checking"])
def test_an_interruption_by_the_progress_callback(tmp_path: Path, sound: bytes, stage: str) -> None:
    (tmp_path / "m.gguf").write_bytes(sound)

    def stop(step: Progress) -> None:
        if step.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(tmp_path / "m.gguf", tmp_path / "new" / "deeper" / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_read_only_folder(tmp_path: Path, sound: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def read_only(path: Path, *given: Any, **options: Any) -> None:
        if ".partial-" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        mkdir(path, *given, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    refused(tmp_path, sound, StorageError, "cannot write .*Permission denied")
    with pytest.raises(StorageError, match="Permission denied"):
        export_model(tmp_path / "m.gguf", tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_sources_and_parents_that_cannot_be(tmp_path: Path, sound: bytes) -> None:
    for source in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=r"does not exist|lacks config\.json"):
            export_model(source, tmp_path / "out")
    (tmp_path / "m.gguf").write_bytes(sound)
    with pytest.raises(EdgespecError):
        export_model(tmp_path / "m.gguf", tmp_path / "m.gguf" / "out")
    assert (tmp_path / "m.gguf").read_bytes() == sound
