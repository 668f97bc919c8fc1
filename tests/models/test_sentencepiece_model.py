"""``tokenizer.model`` files, compared with the ``sentencepiece`` package; and what lies beside them."""

import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from edgespec_export.export import export_model
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_export.sources.hf_tokenizer import to_tokenizer_json
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.hf import config_of, write_checkpoint
from tests.kit.sentencepiece import trained
from tests.kit.tokenizers import CORPUS

KINDS = ("bpe", "unigram")
TEXTS = (*CORPUS, "", " ", "a", "   runs   of spaces ", "<s>[INST] x </s>", "Ω unseen ✓", "line\nbreak\ttab")


def both(tmp_path: Path, model: bytes) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    (tmp_path / "tokenizer.model").write_bytes(model)
    ours = Tokenizer.from_json(to_tokenizer_json(tmp_path / "tokenizer.model"))
    return ours, sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_becomes_the_same_tokens(tmp_path: Path, kind: str, prefix: bool) -> None:
    ours, theirs = both(tmp_path, trained(kind, prefix=prefix))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("kind", KINDS)
def test_a_normalization_is_kept(tmp_path: Path, kind: str) -> None:
    ours, theirs = both(tmp_path, trained(kind, "nmt_nfkc", extra=True))
    for text in (*TEXTS, "ｆｕｌｌ width  ①"):
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_can_be_spelled(tmp_path: Path, kind: str) -> None:
    ours, _ = both(tmp_path, trained(kind))

    @given(st.binary(max_size=20))
    def holds(data: bytes) -> None:
        assert ours.bytes_of(ours.encode_bytes(data)) == data

    holds()


def test_a_directory_with_a_sentencepiece_model_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config_of("llama"))
    model = trained("unigram")
    (folder / "tokenizer.model").write_bytes(model)
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    facts = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<|done|>",
        "add_bos_token": True,
        "chat_template": "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "added_tokens.json").write_text(
        json.dumps({"<|user|>": size + 1, "<|done|>": size}), encoding="utf-8"
    )
    export_model(folder, tmp_path / "out")
    bundle = Bundle(tmp_path / "out")
    special = bundle.manifest.special_tokens
    assert (special.bos, special.eos[0], special.add_bos) == (1, size, True)
    assert set(special.eos) == {size, 2, 3}  # what config.json names stays
    assert bundle.tokenizer.special_id("<|user|>") == size + 1
    assert bundle.tokenizer.encode("<|user|>", special=True)[-1] == size + 1


def test_damaged_and_foreign_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for data in (b"", b"\xff" * 40):
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=r"tokenizer\.model"):
            to_tokenizer_json(path)
    path.write_bytes(trained("char"))
    with pytest.raises(UnsupportedModelError, match="BPE and Unigram"):
        to_tokenizer_json(path)


def test_a_directory_without_any_tokenizer(tmp_path: Path) -> None:
    with (
        HFCheckpoint(write_checkpoint(tmp_path, config_of("llama"))) as opened,
        pytest.raises(ModelFileError, match=r"neither tokenizer\.json nor tokenizer\.model"),
    ):
        opened.tokenizer_json()
