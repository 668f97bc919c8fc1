import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.tokenizers import CORPUS, byte_level_json, sentencepiece_json


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "bytes":
        return Tokenizer.from_json(byte_level_json())
    if kind == "bytes, NFC":
        spec = json.loads(byte_level_json())
        spec["normalizer"] = {"type": "NFC"}
        return Tokenizer.from_json(json.dumps(spec))
    return Tokenizer.from_json(sentencepiece_json(prefix=kind == "sentencepiece, prefix"))


KINDS = ("bytes", "bytes, NFC", "sentencepiece", "sentencepiece, prefix")
every_kind = pytest.mark.parametrize("kind", KINDS)
mixed_bytes = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.text(max_size=6).map(str.encode),
        st.sampled_from([*(text.encode() for text in CORPUS), b"<0x41>", b"<eos>", b"<|im_end|>", b"<tool>"]),
        st.sampled_from([b"\xe2\x96\x81", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"e\xcc\x81", b" ", b"  "]),
    ),
    max_size=6,
).map(b"".join)


@every_kind
@settings(deadline=None)
@given(data=mixed_bytes)
@example(data=b"\xff\xfe \xe2\x96\x81a\xe2\x96")
@example(data=" e\u0301 ".encode())
def test_any_bytes_come_back(kind: str, data: bytes) -> None:
    tok = tokenizer(kind)
    ids = tok.encode_bytes(data)
    assert tok.bytes_of(ids) == data
    assert not any(tok.is_special(id_) for id_ in ids)


@every_kind
@given(text=st.text(max_size=20))
def test_text_never_becomes_special_tokens(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    for special in ("<|im_end|>", "<eos>"):
        assert not any(tok.is_special(id_) for id_ in tok.encode(text + special + text))


def test_special_tokens_only_on_request() -> None:
    tok = tokenizer("bytes")
    end = tok.special_id("<|im_end|>")
    assert end is not None
    assert tok.encode("a<|im_end|>", special=True) == [*tok.encode("a"), end]
    assert end not in tok.encode("a<|im_end|>")
    assert tok.decode(tok.encode("a<|im_end|>")) == "a<|im_end|>"
    assert tok.special_id("<tool>") is None
    (tool,) = tok.encode("<tool>")  # an added token that is not special always matches
    assert (tok.token_bytes(tool), tok.is_special(tool)) == (b"<tool>", False)
    tok = Tokenizer.from_json(byte_level_json(specials=("<|endoftext|>", "the quick")))
    assert tok.encode("the quick", special=True) == [1]
    assert [tok.token_bytes(id_) for id_ in tok.encode("the quick")] == [b"the", b" quick"]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("bytes, NFC", "the quick e\u0301".encode()),
        ("sentencepiece", "the quick \u2581".encode()),
        ("sentencepiece, prefix", b"the quick"),
        ("bytes", b"\xffthe quick\xff"),
    ],
)
def test_only_what_needs_it_is_spelled_in_bytes(kind: str, data: bytes) -> None:
    assert len(tokenizer(kind).encode_bytes(data)) <= 8


def test_special_token_reachable_by_merges_is_spelled_out() -> None:
    spec = json.loads(sentencepiece_json())
    vocab = spec["model"]["vocab"]
    for text in ("<e", "os", "os>"):
        vocab.setdefault(text, len(vocab) + 1)
    for text in "<eos>":
        vocab.setdefault(text, len(vocab) + 1)
    spec["model"]["merges"] = [["<", "e"], ["o", "s"], ["os", ">"], ["<e", "os>"], *spec["model"]["merges"]]
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "  "]
    tok = Tokenizer.from_json(json.dumps(spec))
    assert tok.special_id("<eos>") not in tok.encode("<eos>")
    assert tok.decode(tok.encode("<eos>")) == "<eos>"


@every_kind
def test_every_token_is_found_by_its_bytes(kind: str) -> None:
    tok = tokenizer(kind)
    for id_ in range(tok.vocab_size):
        data = tok.token_bytes(id_)
        match = tok.id_of_bytes(data)
        if data and not tok.is_special(id_):
            assert match is not None and tok.token_bytes(match) == data
        else:
            assert match is None or not tok.is_special(match)
    ids = list(range(tok.vocab_size))
    assert tok.ends(ids) == [len(tok.bytes_of(ids[: n + 1])) for n in ids] and tok.ends([]) == []


def test_byte_token_is_found_only_where_there_is_no_other() -> None:
    tok = tokenizer("sentencepiece")
    assert tok.id_of_bytes(b"t") == tok.encode("t")[0]
    assert tok.id_of_bytes(b"\xff") == tok.encode_bytes(b"\xff")[0]
    assert tok.id_of_bytes(b"") is None
    assert tok.id_of_bytes(b"no such token") is None


def test_bytes_of_tokens_of_both_kinds() -> None:
    tok = tokenizer("sentencepiece")
    assert tok.bytes_of(tok.encode("the quick")) == b"the quick"
    assert tok.token_bytes(3 + 0x41) == b"A"
    spec = json.loads(sentencepiece_json())
    spec["added_tokens"][-1]["content"] = "\u2581\u2581"
    assert Tokenizer.from_json(json.dumps(spec)).token_bytes(spec["added_tokens"][-1]["id"]) == b"  "
    spec = json.loads(byte_level_json(size=300))
    spec["model"]["vocab"]["\x80"] = 300  # outside the byte alphabet: its own text
    assert Tokenizer.from_json(json.dumps(spec)).token_bytes(300) == b"\xc2\x80"


_METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_STEPS = [
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
]
PREFIXED: dict[str, dict[str, Any]] = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": _STEPS}},
    "pre-tokenizer": {"normalizer": None, "pre_tokenizer": _METASPACE},
    "byte level": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_BYTE_LEVEL]}},
}


@pytest.mark.parametrize("put_by", PREFIXED)
def test_prefix_space_is_in_encode_but_not_in_encode_bytes(put_by: str) -> None:
    spec = byte_level_json() if put_by == "byte level" else sentencepiece_json()
    plain = Tokenizer.from_json(spec)
    tok = Tokenizer.from_json(json.dumps(json.loads(spec) | PREFIXED[put_by]))
    assert tok.decode(tok.encode("the")) == " the"
    assert tok.bytes_of(tok.encode_bytes(b"the")) == b"the"
    assert tok.encode_bytes(b"the quick") == plain.encode_bytes(b"the quick")


def test_byte_alphabet_covers_all_bytes() -> None:
    tok = tokenizer("bytes")
    data = bytes(range(256))
    assert tok.bytes_of(tok.encode_bytes(data)) == data
    assert all(tok.id_of_bytes(data[i : i + 1]) is not None for i in range(256))


def test_decoding() -> None:
    tok = tokenizer("bytes")
    ids = tok.encode("a<|im_end|>", special=True)
    assert tok.decode(ids) == "a"
    assert tok.decode(ids, skip_special=False) == "a<|im_end|>"
    assert tok.decode(tok.encode_bytes("é".encode()[:1])) == "\ufffd"


def test_special_spans() -> None:
    text = "é<|im_end|> <tool><|im_end|>"
    spans = tokenizer("bytes").special_spans(text)
    assert [text[start:stop] for start, stop, _ in spans] == ["<|im_end|>", "<|im_end|>"]


def test_padding_rows_are_empty() -> None:
    ids = tokenizer("bytes").vocab_size
    padded = Tokenizer.from_json(byte_level_json(), vocab_size=ids + 5)
    assert padded.vocab_size == ids + 5
    assert padded.token_bytes(ids + 4) == b""
    assert padded.matches(tokenizer("bytes"))


def test_matches_compares_bytes_and_roles() -> None:
    tok = tokenizer("bytes")
    assert tok.matches(Tokenizer.from_json(byte_level_json()))
    assert not tok.matches(Tokenizer.from_json(byte_level_json(size=300)))
    assert not tok.matches(tokenizer("sentencepiece"))
    ordinary = json.loads(byte_level_json())
    ordinary["added_tokens"][0]["special"] = False
    exchanged = json.loads(byte_level_json())
    vocabulary = exchanged["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    for spec in (ordinary, exchanged):
        other = Tokenizer.from_json(json.dumps(spec))
        assert not tok.matches(other) and not other.matches(tok)
    assert other.matches(other)


def test_vocabularies_larger_than_the_head_or_of_billions_are_refused() -> None:
    spec = json.loads(byte_level_json())
    with pytest.raises(TokenizerError, match="LM head has 10 rows"):
        Tokenizer.from_json(json.dumps(spec), vocab_size=10)
    with pytest.raises(TokenizerError, match=r"2,147,483,648 tokens; edgespec reads up to 16,777,216"):
        Tokenizer.from_json(json.dumps(spec), vocab_size=2**31)
    spec["model"]["vocab"]["far"] = 4_000_000_000
    with pytest.raises(TokenizerError, match="4,000,000,001 tokens"):
        Tokenizer.from_json(json.dumps(spec))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_out_of_range_are_refused(token: int) -> None:
    tok = tokenizer("bytes")
    with pytest.raises(TokenizerError, match="not in 0"):
        tok.token_bytes(token)
    with pytest.raises(TokenizerError, match="not in 0"):
        tok.bytes_of([1, token])
    with pytest.raises(TokenizerError, match="not in 0"):
        tok.ends([1, token])


def test_what_cannot_be_encoded_is_an_error() -> None:
    spec = json.loads(byte_level_json(size=300))
    del spec["model"]["vocab"]["ÿ"]
    tok = Tokenizer.from_json(json.dumps(spec))
    assert tok.bytes_of(tok.encode_bytes(b"ok")) == b"ok"
    with pytest.raises(TokenizerError, match="0xFF"):
        tok.encode_bytes(b"\xff")
    with pytest.raises(
        RequestError, match=r"lone surrogate, U\+DFFF, at position 2: half of a .*; remove it"
    ):
        tok.encode("ab\udfffc\ud800")
    with pytest.raises(RequestError, match=r"to encode is b'ab', not a str"):
        tok.encode(b"ab")  # type: ignore[arg-type]


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    spec = json.loads(byte_level_json())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tok = Tokenizer.from_json(json.dumps(spec))
    assert tok.decode(tok.encode("the quick brown fox")) == "the quick brown fox"


def damage(change: Callable[[dict[str, Any]], object]) -> str:
    spec = json.loads(byte_level_json())
    change(spec)
    return json.dumps(spec)


DAMAGED = (
    *("", "{", "[]", "{}", byte_level_json()[:-200]),
    damage(lambda spec: spec.pop("model")),
    damage(lambda spec: spec.update(added_tokens=3)),
    damage(lambda spec: spec.update(decoder={"type": "Unheard"})),
    damage(lambda spec: spec["model"].update(unk_token="absent")),
    damage(lambda spec: spec["model"].update(continuing_subword_prefix="##")),
)


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.json", "binary.json"):
        with pytest.raises(TokenizerError, match="Cannot read"):
            Tokenizer.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [(None, "none"), ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece")],
)
def test_other_kinds_are_refused_by_name(decoder: object, named: str) -> None:
    with pytest.raises(TokenizerError, match=f"BPE model with the decoder {named}"):
        Tokenizer.from_json(damage(lambda spec: spec.update(decoder=decoder)))


def test_threads_do_not_mix_modes() -> None:
    tok = tokenizer("bytes")
    text = "the <|im_end|> dog " * 20
    expected = {special: tok.encode(text, special=special) for special in (False, True)}

    def work(special: bool) -> bool:
        return all(tok.encode(text, special=special) == expected[special] for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, (False, True, False, True)))
