import itertools
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.bridge import ByteBridge
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_tokenizer import chat_templates, special_tokens, tokenizer_json
from edgespec_export.sources.pre_tokenizers import CUTS, SAMPLES
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.tokenizers import (
    CORPUS,
    SPACE_SIGN,
    byte_level_json,
    cut_by,
    gemma4_metadata,
    gguf_metadata,
    sentencepiece_json,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers.json"
CUTS_GOLDEN = GOLDEN.with_name("cuts.json")


@lru_cache
def metadata(kind: str) -> dict[str, object]:
    if kind == "gemma4":
        return gemma4_metadata()
    return gguf_metadata(byte_level_json() if kind == "gpt2" else sentencepiece_json())


def changed(kind: str, **keys: object) -> dict[str, object]:
    """The metadata with some ``tokenizer.ggml`` keys replaced, or left out where None."""
    new = metadata(kind) | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {key: value for key, value in new.items() if value is not None}


def listed(kind: str, key: str, *more: object, **replaced: object) -> list[Any]:
    """A key's list with more behind it, and some of its first replaced: ``_0=...``."""
    values: Any = metadata(kind)[f"tokenizer.ggml.{key}"]
    return [replaced.get(f"_{at}", value) for at, value in enumerate(values)] + [*more]


def read(source: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json(source))


def pieces(tok: Tokenizer, text: str) -> list[bytes]:
    return [tok.token_bytes(id_) for id_ in tok.encode(text)]


@pytest.mark.parametrize(
    ("kind", "original"),
    [("gpt2", byte_level_json()), ("gemma4", sentencepiece_json())],
    ids=lambda text: text[:6],
)
def test_listed_merges_encode_as_the_original(kind: str, original: str) -> None:
    tok, converted = Tokenizer.from_json(original), read(metadata(kind))
    assert converted.matches(tok)
    for text in (*CORPUS, "a<|im_end|><tool><eos>", "\t\n  x"):
        assert converted.encode(text) == tok.encode(text)
        assert converted.encode(text, special=True) == tok.encode(text, special=True)


def test_every_name_cuts_as_llama_cpp_or_as_the_published_tokenizer() -> None:
    """Llama.cpp's pieces hold for a name, but where an expression is known that it approximates."""
    golden = json.loads(CUTS_GOLDEN.read_text(encoding="utf-8"))
    stated = {CUTS[name]: cuts for name, cuts in golden["stated"].items()}
    expected = {name: cuts for names, cuts in golden["llama.cpp"].items() for name in names.split()}
    assert expected.keys() == CUTS.keys()
    for name, cuts in expected.items():
        part = json.loads(tokenizer_json(changed("gpt2", pre=name)))["pre_tokenizer"]
        assert cut_by(part, golden["texts"]) == stated.get(CUTS[name], cuts), name


KINDS = ("llama", "gemma4", *SAMPLES)
kinds = st.sampled_from(KINDS)
texts = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(" \t\n\r'sS12345aAßÄж漢字한\u0301\u3000.,_/😀▁"), max_size=30).map("".join),
)


@lru_cache
def of_kind(kind: str) -> Tokenizer:
    return read(metadata(kind) if kind in ("llama", "gemma4") else changed("gpt2", pre=kind))


@given(kind=kinds, text=texts, data=st.binary(max_size=20))
def test_text_and_bytes_come_back(kind: str, text: str, data: bytes) -> None:
    tok = of_kind(kind)
    assert tok.bytes_of(tok.encode(text)).decode() == (text if kind in SAMPLES else text.replace("▁", " "))
    for given_bytes in (data, text.encode()):
        assert tok.bytes_of(tok.encode_bytes(given_bytes)) == given_bytes


@given(pair=st.tuples(kinds, kinds), text=texts, cut=st.integers(0, 30))
def test_any_two_are_bridged_by_their_bytes(pair: tuple[str, str], text: str, cut: int) -> None:
    target, drafter = map(of_kind, pair)
    tokens = target.encode_bytes(text.encode())
    read_tokens, rest = tokens[:cut], target.bytes_of(tokens[cut:])
    bridge = ByteBridge(target, drafter, prompt_length=0, drafter_prompt=[])
    assert drafter.bytes_of(bridge.to_drafter(read_tokens)) == target.bytes_of(read_tokens)
    drafted = bridge.to_target(drafter.encode_bytes(rest))
    assert target.bytes_of(token for token, _ in drafted) == rest


FOLDER = os.environ.get("EDGESPEC_LLAMA_CPP_MODELS")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="EDGESPEC_LLAMA_CPP_MODELS names no folder with ggml-vocab-*.gguf")
def test_llama_cpp_s_test_files_agree_to_the_token() -> None:
    agreed = []
    for out in sorted(Path(FOLDER or "").glob("ggml-vocab-*.gguf.out")):
        with GGUFFile(out.with_suffix("")) as file:
            source = file.metadata
        if source["tokenizer.ggml.model"] == "bert":
            with pytest.raises(UnsupportedModelError, match=r"'bert'.*of decoders"):
                tokenizer_json(source)
            continue
        tok, expected = read(source), out.read_text(encoding="utf-8").splitlines()
        given_texts = out.with_suffix(".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        for text, ids in zip(given_texts, expected, strict=False):  # the last separator may stand alone
            assert tok.encode(text) == list(map(int, ids.split())), (out.name, text)
            assert tok.bytes_of(tok.encode_bytes(text.encode())) == text.encode()
        agreed.append(len(expected))
    assert len(agreed) >= 14 and min(agreed) >= 46


def test_what_a_pre_tokenizers_name_decides() -> None:
    unnamed, default = (read(changed("gpt2", pre=name)) for name in (None, "default"))
    assert unnamed.encode("a=1234") == default.encode("a=1234")
    for name, count, begun in (("llama-bpe", 1, True), ("glm4", 1, False), ("dbrx", 3, False)):
        # A whole piece that is a token stays one.
        assert len(read(changed("gpt2", merges=[], pre=name)).encode("the")) == count
        assert special_tokens(changed("gpt2", pre=name)).add_bos is begun


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
    types = listed("llama", "token_type", _0=5)
    assert json.loads(tokenizer_json(changed("llama", token_type=types)))["model"]["unk_token"] is None


def test_control_tokens_are_never_merged_from_text() -> None:
    texts = [*dict.fromkeys(["<unk>", "<eos>", "<e", "os>", *"<eos>", "os"])]
    source = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, *[1] * (len(texts) - 2)],
        "tokenizer.ggml.scores": np.arange(len(texts), dtype=np.float32) - 20,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eos_token_id": 1,
    }
    merges = json.loads(tokenizer_json(source))["model"]["merges"]
    assert ["<e", "os>"] not in merges and ["os", ">"] in merges
    assert 1 not in read(source).encode("<eos>")


def test_unused_and_empty_tokens_are_padding() -> None:
    texts = listed("gpt2", "tokens", "[PAD]", "", "")
    types = np.array(listed("gpt2", "token_type", 5, 1, 3), np.int32)
    source = changed("gpt2", tokens=texts, token_type=types)
    tok = Tokenizer.from_json(tokenizer_json(source), vocab_size=len(texts))
    assert [tok.token_bytes(len(texts) - i) for i in (1, 2, 3)] == [b""] * 3
    assert tok.matches(read(metadata("gpt2")))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("type_", [0, 1, 4, 5])  # undefined, normal, user defined, unused
def test_ends_of_turns_are_control_tokens_of_any_type(kind: str, type_: int) -> None:
    """<|im_end|> and the <|endoftext|> of one vocabulary, the <eos> of the other, that no key names."""
    types = listed(kind, "token_type", _0=type_ if kind == "gpt2" else 2, _2=type_)
    source = changed(kind, token_type=types, eos_token_id=None)
    text = "<|im_end|>" if kind == "gpt2" else "<eos>"
    tok, spelled = read(source), read(source).encode(f"a{text}")
    assert special_tokens(source).eos == ((2, 0) if kind == "gpt2" else (2,))
    assert tok.encode(text, special=True)[-1] == 2 and 2 not in spelled
    assert tok.bytes_of(spelled).decode().strip() == f"a{text}"


@pytest.mark.parametrize("type_", [1, 4])
def test_marks_that_the_template_writes_are_control_tokens(type_: int) -> None:
    marks = ("<|system|>", "<|turn|>", "<think>", "[INST]", "<tool>")
    texts = [*listed("gpt2", "tokens"), *marks]
    types = [*listed("gpt2", "token_type"), *[type_] * len(marks)]
    template = "{% for m in messages %}{% if m.role == 'system' %}<|system|>{% else %}<|turn|>{% endif %}"
    template += "[INST]{{ m.content }}{% endfor %}<think>"
    template += "{% if tools %}<tool>{% endif %}"
    source = changed("gpt2", tokens=texts[:-1], token_type=types[:-1])
    source |= {"tokenizer.chat_template": template}
    tok = read(source)
    assert [tok.special_id(mark) is not None for mark in marks] == [True, True, False, True, False]
    size = len(texts)
    assert tok.encode("<|turn|>[INST]", special=True) == [size - 4, size - 2]
    assert not {size - 4, size - 2}.intersection(tok.encode("<|turn|>[INST]"))
    without = read(
        source | {"tokenizer.chat_template": "{{ raise_exception('') if messages[3] }}" + template}
    )
    assert [without.special_id(mark) is not None for mark in marks[:2]] == [False, True]
    assert read(source | {"tokenizer.chat_template": "{{ 1 / 0 }}"}).special_id("<|turn|>") is None


def test_known_marks_need_no_template() -> None:
    types = listed("gpt2", "token_type", _1=1)
    tok = read(changed("gpt2", token_type=types, bos_token_id=None))
    assert tok.encode("<|im_start|>", special=True) == [1] and 1 not in tok.encode("<|im_start|>")


def test_a_call_of_glm4_ends_the_answer() -> None:
    """Directories state three ends, files of llama.cpp's converter two of them."""
    texts, types = listed("gpt2", "tokens", "<|observation|>"), listed("gpt2", "token_type")
    source = changed("gpt2", tokens=texts, token_type=[*types, 3], eot_token_id=2)
    assert special_tokens(source).eos[-1] == len(texts) - 1


def test_a_tag_of_html_is_no_end_unless_the_file_says_so() -> None:
    texts, types = listed("gpt2", "tokens", "</s>"), listed("gpt2", "token_type")
    for type_, end, expected in ((4, 2, False), (3, 2, True), (1, len(texts) - 1, True)):
        source = changed("gpt2", tokens=texts, token_type=[*types, type_], eos_token_id=end)
        assert (read(source).special_id("</s>") is not None) is expected
        assert (len(texts) - 1 in special_tokens(source).eos) is expected


def test_an_ordinary_word_that_is_named_as_an_end_stays_text() -> None:
    tok = read(changed("gpt2", eos_token_id=listed("gpt2", "tokens").index("the")))
    assert tok.special_id("the") is None and len(tok.encode("the")) == 1


def test_a_file_that_does_not_say_how_texts_are_cut_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_json(metadata("llama"))
    tokenizer_json(changed("gpt2", pre="default"))
    assert not caplog.messages
    tokenizer_json(changed("gpt2", pre=None))
    assert "lacks tokenizer.ggml.pre" in caplog.text


def test_phi_3_drops_the_whitespace_behind_special_tokens() -> None:
    plain, phi = (read(metadata("llama") | {"general.architecture": name}) for name in ("llama", "phi3"))
    text = "<eos> \n the<unk> \n the"
    end, unknown = (plain.special_id(name) for name in ("<eos>", "<unk>"))
    the, spaced = plain.encode("the"), plain.encode(" \n the")
    assert plain.encode(text, special=True) == [end, *spaced, unknown, *spaced]
    assert phi.encode(text, special=True) == [end, *the, unknown, *spaced]


def test_special_tokens() -> None:
    special = special_tokens(changed("gpt2", padding_token_id="nobody reads it", eot_token_id=5))
    assert (special.bos, special.eos, special.add_bos) == (1, (2, 5, 0), False)
    special = special_tokens(changed("llama", bos_token_id=None, eos_token_id=None))
    assert (special.bos, special.eos, special.add_bos) == (1, (2,), True)
    assert special_tokens(changed("llama", add_bos_token=False)).add_bos is False
    for added in (None, True, False):  # files of Gemma 4 are wrong about it
        assert special_tokens(changed("gemma4", add_bos_token=added)).add_bos is True
    assert special_tokens(changed("gpt2", bos_token_id=None)).bos is None


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
def test_the_first_token_of_a_text_counts(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, keys = read(changed(kind)), metadata(kind)
    the, end = plain.encode("the")[-1], special_tokens(changed(kind)).eos[0]
    tokens, types = listed(kind, "tokens"), listed(kind, "token_type")
    again = ((the, 1), (end, 3), (end, 1), (the, 4))  # ids and types
    more: dict[str, list[Any]] = {
        "tokens": [*tokens, *(tokens[id_] for id_, _ in again)],
        "token_type": [*types, *(type_ for _, type_ in again)],
    }
    for name, value in (("scores", 9.0), ("merges", None)):
        if f"tokenizer.ggml.{name}" in keys:
            values = listed(kind, name)
            more[name] = values + (values[:1] if value is None else [value] * len(again))
    made = read(changed(kind, **more))
    for text in ("the there other", f"{tokens[end]} the"):
        assert made.encode(text, special=True) == plain.encode(text, special=True)
    assert "tokenizer.ggml.tokens repeats" in caplog.text
    assert ("tokenizer.ggml.merges repeats" in caplog.text) is ("merges" in more)
    assert special_tokens(changed(kind, **more)) == special_tokens(changed(kind))


def test_a_gemma_4_of_ollama_is_cut_as_gemma_4() -> None:
    numbers = np.arange(len(listed("gemma4", "tokens")), dtype=np.float32)
    source = changed("gemma4", model="llama", pre="gemma4", scores=numbers)
    assert tokenizer_json(source) == tokenizer_json(changed("gemma4"))
    assert special_tokens(source) == special_tokens(changed("gemma4"))
    with pytest.raises(ModelFileError, match="merges must be a list"):
        tokenizer_json(changed("gemma4", model="llama", pre="gemma4", merges=None))


def test_numbers_of_tokens_are_no_scores() -> None:
    numbers = np.arange(len(listed("llama", "tokens")), dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="in place of scores"):
        tokenizer_json(changed("llama", scores=numbers))


def test_the_cut_that_ollama_calls_default_is_the_family_s() -> None:
    for family, cut in (("lfm2", "lfm2"), ("mistral3", "tekken"), ("llama", "default")):
        named = tokenizer_json(changed("gpt2", pre=cut))
        for stated in ("default", None):
            source = changed("gpt2", pre=stated) | {"general.architecture": family}
            assert tokenizer_json(source) == named


def test_a_list_of_ends_is_read() -> None:
    ends = special_tokens(changed("gpt2", eos_token_ids=np.array([2, 7, 2**20], np.int32))).eos
    assert ends == (2, 7, 0)


def test_an_unused_token_does_not_hide_a_later_one() -> None:
    tokens = [*listed("gpt2", "tokens")]
    the = tokens.index("the")
    types = [*listed("gpt2", "token_type"), 1]
    types[the] = 5
    spec = json.loads(tokenizer_json(changed("gpt2", tokens=[*tokens, "the"], token_type=types)))
    assert spec["model"]["vocab"]["the"] == len(tokens)


DAMAGED: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("gpt2", "lacks 'model'"): ({"model": None},),
    ("gpt2", "is 3, not a text"): ({"model": 3}, {"pre": 3}),
    ("gpt2", "tokens must be a list"): ({"tokens": None}, {"tokens": ["a", 3]}, {"tokens": "abc"}),
    ("gpt2", "is empty"): ({"tokens": [], "token_type": None},),
    ("gpt2", "not valid UTF-8"): ({"tokens": ["a", "\udcff"], "token_type": None},),
    ("gpt2", "one per token"): (
        *({"token_type": wrong} for wrong in ([1, 2], ["1"], [[1], 2])),
        {"token_type": [1.5] * len(listed("gpt2", "tokens"))},
    ),
    ("gpt2", "merges must be a list"): ({"merges": None},),
    ("gemma4", "merges must be a list"): ({"merges": None},),
    ("gpt2", "Merge 0"): ({"merges": ["no merge"]}, {"merges": ["ab"]}, {"merges": [""]}),
    ("llama", "scores must hold"): (
        *({"scores": wrong} for wrong in (None, np.zeros(3, np.float32), np.array(["a"]))),
        {"scores": [float("nan")] * len(listed("llama", "tokens"))},
    ),
    ("llama", "true or false"): ({"add_space_prefix": "yes"},),
    ("llama", "must be an id"): ({"unknown_token_id": "0"},),
}


@pytest.mark.parametrize(("kind", "complaint"), DAMAGED)
def test_damaged_metadata(kind: str, complaint: str) -> None:
    for keys in DAMAGED[kind, complaint]:
        with pytest.raises(ModelFileError, match=complaint):
            tokenizer_json(changed(kind, **keys))


@pytest.mark.parametrize("value", ["2", True, 1.5])
def test_special_token_ids_are_checked(value: object) -> None:
    with pytest.raises(ModelFileError, match="must be an id"):
        special_tokens(changed("gpt2", eos_token_id=value))


@pytest.mark.parametrize("value", [-1, 2**32 - 1, len(listed("llama", "tokens"))])
def test_ids_that_no_token_has_are_said_and_left_out(value: int, caplog: pytest.LogCaptureFixture) -> None:
    assert special_tokens(changed("gpt2", bos_token_id=value, eos_token_id=value, eot_token_id=2)).eos == (
        2,
        0,
    )
    assert f"no token has the tokenizer.ggml.eos_token_id {value}" in caplog.messages
    special = special_tokens(changed("llama", bos_token_id=value, eos_token_id=value))
    assert (special.bos, special.eos) == (1, (2,))  # what files of the kind have where they do not say it
    unknown = changed("llama", unknown_token_id=value)
    assert json.loads(tokenizer_json(unknown))["model"]["unk_token"] == "<unk>"


def test_chat_templates_and_unknown_kinds() -> None:
    assert chat_templates({}) == {}
    assert chat_templates({"tokenizer.chat_template": "{{ x }}"}) == {"default": "{{ x }}"}
    keys = {"tokenizer.chat_template": "x", "tokenizer.chat_template.tool_use": "y"}
    assert chat_templates(keys | {"tokenizer.chat_template.other": "z"}) == {"default": "x", "tool_use": "y"}
    assert chat_templates({"tokenizer.chat_template.rag": "z"}) == {"default": "z", "rag": "z"}
    with pytest.raises(ModelFileError, match="int"):
        chat_templates({"tokenizer.chat_template": 3})
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'.*gpt2.*llama"):
        tokenizer_json(changed("gpt2", model="rwkv"))
    with pytest.raises(UnsupportedModelError, match=r"'martian'.*smollm.*llama-bpe.*qwen2.*Hugging Face"):
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
