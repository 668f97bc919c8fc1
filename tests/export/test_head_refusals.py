"""EAGLE-3 heads that are damaged, or do not fit their target: each is one clear error."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, UnsupportedModelError
from tests.kit import heads as heads
from tests.kit.gguf import random_raw, tiny_gguf
from tests.kit.heads import DRAFTED, TOKENS, Head, export


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return heads.target(tmp_path / "target")


def offset(head: Head, at: int, value: int) -> None:
    assert head.offsets is not None
    head.offsets[at] = value


def floats_for_tokens(head: Head) -> None:
    head.offsets = None
    head.tensors["d2t"] = np.ones(9, np.float32)


def short_list(head: Head) -> None:
    head.offsets = np.arange(DRAFTED - 1)


def no_list(head: Head) -> None:
    head.offsets = None


def cut(head: Head, name: str) -> None:
    head.tensors[name] = head.tensors[name][:, :-32].copy()


WRONG: dict[str, tuple[Callable[[Head], object], type[EdgespecError], str]] = {
    "another vocabulary": (
        lambda h: h.facts.update(vocab_size=999),
        RequestError,
        "vocab_size is 999, of target",
    ),
    "another width": (
        lambda h: h.facts.update(target_hidden_size=32),
        RequestError,
        "target_hidden_size is 32",
    ),
    "unsaid width": (
        lambda h: cut(h, "fc.weight"),
        ModelFileError,
        r"fc.weight.*\(64, 160\).*ask for \(64, 192\).* or a head of this target, target",
    ),
    "layers": (
        lambda h: h.facts.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        RequestError,
        r"\[2, 4, 9\].* has 0 to 7",
    ),
    "one layer twice": (
        lambda h: h.facts.update(eagle_aux_hidden_state_layer_ids=[4, 4, 6]),
        RequestError,
        r"\[4, 4, 6\].* has 0 to 7",
    ),
    "no layers": (
        lambda h: h.facts.update(eagle_aux_hidden_state_layer_ids=[]),
        RequestError,
        "enters the layers",
    ),
    "words": (
        lambda h: h.facts.update(eagle_aux_hidden_state_layer_ids="2,4"),
        RequestError,
        "enters the layers '2,4'",
    ),
    "unordered": (lambda h: offset(h, 3, 90), ModelFileError, "ascending. Give the target"),
    "too large": (lambda h: offset(h, -1, 9000), ModelFileError, "tokens from 0 to 319"),
    "negative": (lambda h: offset(h, 0, -1), ModelFileError, "tokens from 0 to 319"),
    "huge": (lambda h: offset(h, 7, 2**63 - 9), ModelFileError, "tokens from 0 to 319"),
    "short list": (short_list, ModelFileError, "lm_head.weight.*ask for"),
    "no list": (no_list, ModelFileError, "lm_head.weight.*ask for"),
    "no LM head": (lambda h: h.tensors.pop("lm_head.weight"), ModelFileError, "lm_head.weight.*ask for"),
    "narrow q": (lambda h: cut(h, "midlayer.self_attn.q_proj.weight"), ModelFileError, "q_proj.*ask for"),
    "no k": (
        lambda h: h.tensors.pop("midlayer.self_attn.k_proj.weight"),
        ModelFileError,
        "lacks a tensor for .*k",
    ),
    "no fc": (lambda h: h.tensors.pop("fc.weight"), ModelFileError, "lacks a tensor for fuse"),
    "no norm": (
        lambda h: h.facts.update(norm_before_fc=True),
        ModelFileError,
        "lacks a tensor for fuse_norm",
    ),
    "normed heads": (
        lambda h: h.tensors.update({"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}),
        UnsupportedModelError,
        "q_norm",
    ),
    "surplus": (
        lambda h: h.tensors.update({"mtp.weight": np.ones(16, np.float32)}),
        UnsupportedModelError,
        "mtp.weight",
    ),
    "two layers": (
        lambda h: h.facts.update(num_hidden_layers=2),
        UnsupportedModelError,
        "2 layers of eagle3",
    ),
    "quantized": (
        lambda h: h.facts.update(quantization_config={"quant_method": "fp8"}),
        UnsupportedModelError,
        "fp8",
    ),
    "float list": (
        floats_for_tokens,
        ModelFileError,
        "dtype F32, not I64 or I32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, target: Path, case: str) -> None:
    change, kind, message = WRONG[case]
    head = Head.random()
    change(head)
    with pytest.raises(kind, match=message):
        export(head.write(tmp_path / "head"), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


OTHERS: dict[str, dict[str, Any]] = {
    "dominodraftmodel": {"architectures": ["DominoDraftModel"], "model_type": "qwen3"},
    "domino": {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
    "peagledraftmodel": {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 32000},
    "peagle": {"architectures": ["x"], "speculators_model_type": "peagle", "draft_vocab_size": 320},
    "eaglellamamodel": {"architectures": ["EagleLlamaModel"], "model_type": "llama"},
    "fc_norm": {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
    "ptd_token_id": {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 9},
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_of_other_kinds_are_named(tmp_path: Path, target: Path, name: str) -> None:
    head = Head.random()
    for key in ("architectures", "draft_vocab_size"):
        head.facts.pop(key, None)
    head.facts |= OTHERS[name]
    source = head.write(tmp_path / "head")
    for of in (None, target):
        with pytest.raises(UnsupportedModelError, match=rf"another kind \({name}\); edgespec has those of"):
            open_checkpoint(source, of)


def test_a_narrow_head_needs_an_embedding_of_its_own(tmp_path: Path, target: Path) -> None:
    head = Head.random(hidden_size=32)
    with pytest.raises(ModelFileError, match=r"embed_tokens.*ask for .320, 32.*give the target"):
        export(head.write(tmp_path / "head"), target, tmp_path / "out")


def test_truncated_files_are_refused(tmp_path: Path, target: Path) -> None:
    whole = tiny_gguf("llama", "Q8_0", layers=8).write(tmp_path / "target.gguf")
    folder = Head.random().write(tmp_path / "head")
    file = heads.gguf_head("Q8_0").write(tmp_path / "head.gguf")
    for path, source, of in ((folder / "model.safetensors", folder, target), (file, file, whole)):
        data = path.read_bytes()
        for size in (len(data) - 1, len(data) // 2, 100, 8, 0):
            path.write_bytes(data[:size])
            with pytest.raises(ModelFileError):
                export(source, of, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_list_of_tokens_beyond_the_files_end(tmp_path: Path) -> None:
    whole = tiny_gguf("llama", "Q8_0", layers=8).write(tmp_path / "target.gguf")
    file = heads.gguf_head("Q8_0").write(tmp_path / "head.gguf")
    data = file.read_bytes()
    at = data.index(struct.pack("<Q3s", 3, b"d2t")) + 8 + 3 + 4  # its name, and that it has one dimension
    file.write_bytes(data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :])
    with pytest.raises(ModelFileError, match="tensor 'd2t' needs"):
        export(file, whole, tmp_path / "out")


def test_columns_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    whole = tiny_gguf("llama", "Q8_0", layers=8).write(tmp_path / "target.gguf")
    model = heads.gguf_head("Q8_0", embedding_length=128)
    model.tensors["blk.0.attn_q.weight"] = (
        "Q4_K",
        random_raw(np.random.default_rng(0), 128, 256, "Q4_K"),
    )
    model.tensors["token_embd.weight"] = "F32", np.zeros((401, 128), np.float32)
    for name, (kind, raw) in model.tensors.items():
        if kind == "Q8_0" and name != "fc.weight":
            model.tensors[name] = (
                "F32",
                np.zeros((len(raw), 256 if "attn_k" in name or "attn_v" in name else 128), "f4"),
            )
    with pytest.raises(
        UnsupportedModelError, match=r"attn_q.weight' is cut at column 128, but Q4_K has blocks of 256"
    ):
        export(model.write(tmp_path / "head.gguf"), whole, tmp_path / "out")


def test_a_head_and_its_target_belong_together(tmp_path: Path, target: Path) -> None:
    head, out = Head.random().write(tmp_path / "head"), tmp_path / "out"
    file = heads.gguf_head("Q8_0").write(tmp_path / "head.gguf")
    for source in (head, file):
        with pytest.raises(RequestError, match=r"is a head.*--target"):
            export_model(source, out)
        with pytest.raises(RequestError, match=r"is a head"):
            export(head, source, out)
    plain = tiny_gguf("llama", "Q8_0", layers=8).write(tmp_path / "plain.gguf")
    for source in (target, plain):
        with pytest.raises(RequestError, match=r"is no head and has no MTP layer.*Leave out --target"):
            export(source, target, out)
    export_model(target, tmp_path / "bundle")
    with pytest.raises(ModelFileError, match="as a head's target give the source that it was made of"):
        export(head, tmp_path / "bundle", out)
    with pytest.raises(ModelFileError, match="does not exist"):
        export(head, tmp_path / "nowhere", out)
    kernels = "heads run on edgespec's kernels.*; leave out "
    refused: list[tuple[dict[str, Any], str]] = [
        ({"weights": "portable"}, f"{kernels}weights"),
        ({"device": "cuda"}, f"{kernels}device"),
        ({"trim": 100}, "whose LM head is not trimmed; leave out trim"),
    ]
    for options, message in refused:
        with pytest.raises(RequestError, match=message):
            export(head, target, out, **options)
    with pytest.raises(RequestError, match="use role=drafter"):
        export_model(head, out, options=ExportOptions(target=target))


@pytest.mark.parametrize("name", ["d2t", "blk.0.attn_q.bias"])
def test_ordinary_files_with_a_list_of_whole_numbers_are_refused(tmp_path: Path, name: str) -> None:
    model = tiny_gguf("qwen2", "Q8_0")
    model.tensors[name] = "I64", TOKENS.astype(np.int64)
    with pytest.raises(UnsupportedModelError, match=f"'{name}'"):
        GGUFCheckpoint(model.write(tmp_path / "m.gguf"))
