import itertools
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_tokenizer import chat_template, special_tokens, tokenizer_json
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.text.tokenizer import Tokenizer
from tests.tokenizers_for_tests import CORPUS, SPACE_SIGN, byte_level_json, gguf_metadata, sentencepiece_json

GOLDEN = Path(__file__).parent / "golden" / "tokenizers.json"


@lru_cache
def metadata(kind: str) -> dict[str, object]:
    return gguf_metadata(byte_level_json() if kind == "gpt2" else sentencepiece_json())


def changed(kind: str, **keys: object) -> dict[str, object]:
    """The metadata with some ``tokenizer.ggml`` keys replaced, or left out where None."""
    new = metadata(kind) | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {key: value for key, value in new.items() if value is not None}


def texts_of(kind: str) -> list[str]:
    texts = metadata(kind)["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    return texts


def read(source: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json(source))


def pieces(tok: Tokenizer, text: str) -> list[bytes]:
    return [tok.token_bytes(id_) for id_ in tok.encode(text)]


def words(pre: str, text: str) -> list[bytes]:
    """How a pre-tokenizer cuts: every two neighbours merge here, so only a cut keeps bytes apart."""
    spans = itertools.combinations(range(len(text) + 1), 2)
    spellings = sorted({spelled(text[a:b]) for a, b in spans}, key=lambda word: (len(word), word))
    merges = [f"{word[:cut]} {word[cut:]}" for word in spellings for cut in range(1, len(word))]
    source = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": spellings,
        "tokenizer.ggml.merges": merges,
    }
    return pieces(read(source), text)


def spelled(text: str) -> str:
    """ASCII text in GPT-2's byte alphabet."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ").replace("\r", "č").replace("\t", "ĉ")


def test_byte_level_encodes_as_the_original() -> None:
    original, converted = Tokenizer.from_json(byte_level_json()), read(metadata("gpt2"))
    assert converted.matches(original)
    for text in (*CORPUS, "a<|im_end|><tool>", "\t\n  x"):
        assert converted.encode(text) == original.encode(text)
        assert converted.encode(text, special=True) == original.encode(text, special=True)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 123  ok!?\n", ["it", "'s", " 123", " ", " ok", "!?", "\n"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "it's 123  ok", ["it", "'s", " ", "1", "2", "3", " ", " ok"]),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", " ", "1", "2", "3", "\n\n", " x"]),
        ("qwen2", "(ab) {c}\n", ["(ab", ")", " {", "c", "}\n"]),
        ("llama-bpe", "a1234 .\n", ["a", "123", "4", " .\n"]),
        ("default", "x=$1234 +1", ["x", "=$", "123", "4", " ", "+", "1"]),
    ],
)
def test_pre_tokenizers_cut(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == [piece.encode() for piece in expected]


def test_what_a_pre_tokenizers_name_decides() -> None:
    unnamed, default = (read(changed("gpt2", pre=name)) for name in (None, "default"))
    assert unnamed.encode("a=1234") == default.encode("a=1234")
    for name, count in (("llama-bpe", 1), ("dbrx", 3)):  # whether a whole piece stays one
        assert len(read(changed("gpt2", merges=[], pre=name)).encode("the")) == count


def by_score(source: dict[str, object], text: str) -> list[str]:
    """SentencePiece's rule in its plainest form: join the adjacent pair whose whole scores highest."""
    texts, types, scores = (source[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert isinstance(texts, list) and isinstance(types, list) and isinstance(scores, np.ndarray)
    score = {t: float(s) for t, kind, s in zip(texts, types, scores, strict=True) if kind == 1}
    symbols = list(text.replace(" ", SPACE_SIGN))
    while True:
        pairs = enumerate(itertools.pairwise(symbols))
        joined = [(score.get(left + right, -np.inf), -i) for i, (left, right) in pairs]
        best, at = max(joined, default=(-np.inf, 0))
        if best == -np.inf:
            break
        symbols[-at : -at + 2] = ["".join(symbols[-at : -at + 2])]
    return symbols


@given(text=st.text(alphabet=sorted(set("".join(CORPUS)) - {" "}), max_size=40))
def test_sentencepiece_merges_by_score(text: str) -> None:
    source = metadata("llama")
    tok = read(source)
    spaced = " ".join(text)[:30] + text
    expected = [symbol.replace(SPACE_SIGN, " ").encode() for symbol in by_score(source, spaced)]
    assert pieces(tok, spaced) == expected


def test_sentencepiece_vocabulary_and_added_tokens() -> None:
    tok = read(metadata("llama"))
    assert tok.matches(Tokenizer.from_json(sentencepiece_json()))
    assert pieces(tok, "the  fox")[-2:] != pieces(tok, "the fox")[-2:]
    assert b"  " in pieces(tok, "the  fox")
    assert tok.decode(tok.encode("\u0f00x")) == "\u0f00x"
    assert tok.special_id("<eos>") == 2 and 2 not in tok.encode("<eos>")


def test_space_prefix_and_an_unused_unknown_token() -> None:
    source = changed("llama", add_space_prefix=None)
    assert read(source).decode(read(source).encode("the")) == " the"
    assert pieces(read(metadata("llama")), "the")[0] != pieces(read(source), "the")[0]
    types = list(metadata("llama")["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    types[0] = 5
    assert json.loads(tokenizer_json(changed("llama", token_type=types)))["model"]["unk_token"] is None


def test_control_tokens_are_never_merged_from_text() -> None:
    texts = [*dict.fromkeys(["<unk>", "<eos>", "<e", "os>", *"<eos>", "os"])]
    source = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, *[1] * (len(texts) - 2)],
        "tokenizer.ggml.scores": np.arange(len(texts), dtype=np.float32),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eos_token_id": 1,
    }
    merges = json.loads(tokenizer_json(source))["model"]["merges"]
    assert ["<e", "os>"] not in merges and ["os", ">"] in merges
    assert 1 not in read(source).encode("<eos>")


def test_unused_and_empty_tokens_are_padding() -> None:
    texts = metadata("gpt2")["tokenizer.ggml.tokens"]
    types = metadata("gpt2")["tokenizer.ggml.token_type"]
    assert isinstance(texts, list) and isinstance(types, list)
    source = changed(
        "gpt2", tokens=[*texts, "[PAD]", "", ""], token_type=np.array([*types, 5, 1, 3], np.int32)
    )
    tok = Tokenizer.from_json(tokenizer_json(source), vocab_size=len(texts) + 3)
    assert [tok.token_bytes(len(texts) + i) for i in range(3)] == [b""] * 3
    assert tok.matches(read(metadata("gpt2")))


def test_special_tokens() -> None:
    found = special_tokens(changed("gpt2", padding_token_id=0, eot_token_id=5))
    assert (found.bos, found.eos, found.add_bos, found.pad) == (1, (2, 5, 0), False, 0)
    found = special_tokens(changed("llama", bos_token_id=None, eos_token_id=None))
    assert (found.bos, found.eos, found.add_bos, found.pad) == (1, (2,), True, None)
    assert special_tokens(changed("llama", add_bos_token=False)).add_bos is False
    assert special_tokens(changed("gpt2", pre="llama-bpe")).add_bos is True
    assert special_tokens(changed("gpt2", bos_token_id=None)).bos is None
    types = list(metadata("gpt2")["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    types[0] = 1  # no control token, so not the end by its text
    assert special_tokens(changed("gpt2", token_type=types)).eos == (2,)


@pytest.mark.parametrize(
    ("kind", "keys", "complaint"),
    [
        ("gpt2", {"model": None}, "lacks 'model'"),
        ("gpt2", {"model": 3}, "model is 3, not a text"),
        ("gpt2", {"tokens": None}, "tokens must be a list"),
        ("gpt2", {"tokens": ["a", 3]}, "tokens must be a list"),
        ("gpt2", {"tokens": "abc"}, "tokens must be a list"),
        ("gpt2", {"tokens": [], "token_type": None}, "is empty"),
        ("gpt2", {"tokens": ["a", "b", "a"], "token_type": None}, "'a' appears twice"),
        ("gpt2", {"tokens": ["a", "\udcff"], "token_type": None}, "not valid UTF-8"),
        ("gpt2", {"token_type": [1, 2]}, "one per token"),
        ("gpt2", {"token_type": ["1"]}, "one per token"),
        ("gpt2", {"token_type": [[1], 2]}, "one per token"),
        ("gpt2", {"token_type": [1.5] * len(texts_of("gpt2"))}, "one per token"),
        ("gpt2", {"pre": 3}, "pre is 3, not a text"),
        ("gpt2", {"merges": None}, "merges must be a list"),
        ("gpt2", {"merges": ["no merge"]}, "Merge 0"),
        ("gpt2", {"merges": ["ab"]}, "Merge 0"),
        ("gpt2", {"merges": [""]}, "Merge 0"),
        ("llama", {"scores": None}, "scores must hold"),
        ("llama", {"scores": np.zeros(3, np.float32)}, "scores must hold"),
        ("llama", {"scores": [float("nan")] * len(texts_of("llama"))}, "scores must hold"),
        ("llama", {"scores": np.array(["a"])}, "scores must hold"),
        ("llama", {"add_space_prefix": "yes"}, "true or false"),
        ("llama", {"unknown_token_id": 10**6}, "must be an id"),
    ],
)
def test_damaged_metadata(kind: str, keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelFileError, match=complaint):
        tokenizer_json(changed(kind, **keys))


@pytest.mark.parametrize("value", [-1, 10**6, "2", True, 1.5])
def test_special_token_ids_are_checked(value: object) -> None:
    with pytest.raises(ModelFileError, match="must be an id"):
        special_tokens(changed("gpt2", eos_token_id=value))


def test_chat_templates_and_unknown_kinds() -> None:
    assert chat_template({}) is None
    assert chat_template({"tokenizer.chat_template": "{{ x }}"}) == "{{ x }}"
    with pytest.raises(ModelFileError, match="int"):
        chat_template({"tokenizer.chat_template": 3})
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'.*gpt2.*llama"):
        tokenizer_json(changed("gpt2", model="rwkv"))
    with pytest.raises(UnsupportedModelError, match=r"'martian'.*llama-bpe.*qwen2.*smollm"):
        tokenizer_json(changed("gpt2", pre="martian"))


@pytest.mark.models
@pytest.mark.parametrize(
    "name",
    ["smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"],
)
def test_real_tokenizers_encode_as_the_references(name: str) -> None:
    """The ids in the golden file come from llama.cpp and transformers."""
    from edgespec_models.downloads.catalog import find
    from edgespec_models.downloads.download import pull

    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    with GGUFFile(pull(find(name))) as file:
        tok = read(file.metadata)
    assert cases
    for case in cases:
        text, ids = case["text"], case["ids"]
        # llama.cpp takes every "</s>" for a control token; to Gemma it is a tag of HTML.
        if name != "gemma-3-270m" or "</s>" not in text:
            assert tok.encode(text) == ids, text
        assert tok.bytes_of(tok.encode_bytes(text.encode())) == text.encode()
