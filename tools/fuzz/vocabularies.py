"""Targets: ``tokenizer.json``, and SentencePiece's ``tokenizer.model``; loaded, and used on texts."""

import json
from pathlib import Path
from typing import Any, Final

from edgespec_export.sources.sentencepiece_model import to_tokenizer_json
from edgespec_models.errors import ModelFileError, RequestError, TokenizerError, UnsupportedModelError, naming
from edgespec_models.text.tokenizer import Tokenizer
from tools.fuzz.forms import JSON, PROTOBUF
from tools.fuzz.rules import Rule, Target, only, table, text_of, untouched

__all__ = ["TARGETS", "few_tokens", "use_tokenizer"]

_TEXT: Final = "a cab <|im_end|> é日\u2581\t  the quick 😀 12345\r\n\n <0x41>"


def use_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    """Encode and decode; text that the vocabulary cannot spell is a TokenizerError."""
    with only(TokenizerError, RequestError):
        tokenizer.decode(tokenizer.encode(text, special=True), skip_special=False)
    with only(TokenizerError, RequestError):
        forged = [id_ for id_ in tokenizer.encode(text) if tokenizer.is_special(id_)]
        assert set(forged) <= {tokenizer._unknown}, "a text spells a control token"
    data = text.encode("utf-8", "surrogatepass")
    with only(TokenizerError):
        assert tokenizer.bytes_of(tokenizer.encode_bytes(data)) == data, "bytes do not come back"
    with only(TokenizerError, RequestError):
        assert all(0 <= a <= b <= len(text) for a, b in tokenizer.special_spans(text))
    last = tokenizer.vocab_size - 1
    assert tokenizer.matches(tokenizer)
    assert isinstance(tokenizer.token_bytes(last) + tokenizer.bytes_of([0, last]), bytes)
    tokenizer.id_of_bytes(b"a")


def _tokenizer(folder: Path) -> Rule:
    """The input has the file's JSON (a text stands for what is no JSON), rows of an LM head, and a text."""
    path = folder / "tokenizer.json"

    def rule(data: bytes) -> None:
        tree = table(data)
        spec, rows = tree.get("json"), tree.get("rows")
        path.write_text(spec if isinstance(spec, str) else json.dumps(spec), "utf-8", "surrogatepass")
        size = rows if isinstance(rows, int) and 0 < rows < 1 << 20 else None
        with untouched(folder), only(TokenizerError, names=path.name):
            tokenizer = Tokenizer.from_file(path, vocab_size=size)
            use_tokenizer(tokenizer, text_of(tree.get("text")))

    return rule


def few_tokens(text: str) -> dict[str, Any]:
    """A ``tokenizer.json`` without most of its tokens for bytes, and what is made of those."""
    spec: dict[str, Any] = json.loads(text)
    model = spec["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[piece, score] for piece, score in model["vocab"] if _is_kept(piece)]
        return spec
    model["vocab"] = {piece: id_ for piece, id_ in model["vocab"].items() if _is_kept(piece)}
    model["merges"] = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= model["vocab"].keys()]
    return spec


def _is_kept(piece: str) -> bool:
    if piece.startswith("<0x"):
        return piece < "<0x22>"
    return piece.isascii() or piece[:1] in "Ġ\u2581ĊĉÃ©"


def _tokenizer_seeds() -> list[bytes]:
    from tests.sentencepiece_for_tests import trained
    from tests.tokenizers_for_tests import byte_level_json, sentencepiece_json

    unigram = _converted(trained("unigram"))
    texts = (byte_level_json(size=330), sentencepiece_json(size=330, prefix=True), unigram)
    specs = [few_tokens(text) for text in texts]
    specs[0]["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    specs[0]["normalizer"] = {"type": "NFC"}
    return [JSON.write({"json": spec, "rows": 500, "text": _TEXT}) for spec in specs]


def _converted(model: bytes) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(model)
        return to_tokenizer_json(path, {})


def _sentencepiece(folder: Path) -> Rule:
    path = folder / "tokenizer.model"

    def rule(data: bytes) -> None:
        path.write_bytes(data)
        errors = (ModelFileError, UnsupportedModelError, TokenizerError)
        with untouched(folder), only(*errors, names=path.name), naming(path):
            text = to_tokenizer_json(path, {3: ("<tool>", True), 400: ("<|im_end|>", True)})
            use_tokenizer(Tokenizer.from_json(text), _TEXT)

    return rule


def _sentencepiece_seeds() -> list[bytes]:
    """Models without most of their pieces."""
    from tests.sentencepiece_for_tests import trained

    seeds = []
    for kind, rule in (("bpe", "identity"), ("unigram", "identity")):
        fields = PROTOBUF.read(trained(kind, rule, extra=kind == "bpe"))
        pieces = [field for field in fields if field[0] == 1]
        kept = [*pieces[:20], *pieces[255:300]]
        seeds.append(PROTOBUF.write([field for field in fields if field[0] != 1 or field in kept]))
    return seeds


TARGETS: Final = {
    "tokenizer": Target(form=JSON, seeds=_tokenizer_seeds, rule=_tokenizer, words=(_TEXT, "<0x0A>", "Ġ")),
    "sentencepiece": Target(form=PROTOBUF, seeds=_sentencepiece_seeds, rule=_sentencepiece),
}
