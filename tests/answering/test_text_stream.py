from functools import lru_cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.answering.answer_reading import TextStream
from edgespec.asking.request import Request
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.tokenizers import byte_level_json, sentencepiece_json


@lru_cache
def tokenizer(kind: str = "bytes") -> Tokenizer:
    return Tokenizer.from_json(byte_level_json() if kind == "bytes" else sentencepiece_json())


def chunked(stream: TextStream, tokens: list[int], size: int) -> list[str]:
    return [stream.push(tokens[i : i + size]) for i in range(0, len(tokens), size)] + [stream.finish()]


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before a stop string, and that: character by character, as nothing in the stream reads."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def showable(data: bytes, stops: list[str]) -> str:
    """What may be shown of a text that goes on: whole characters, but for what may begin a stop string."""
    ends = (stop.encode()[:n] for stop in stops for n in range(1, len(stop.encode())))
    held = max((len(end) for end in ends if data.endswith(end)), default=0)
    return data[: len(data) - held].decode(errors="ignore")


some_tokens = st.lists(st.integers(0, tokenizer().vocab_size - 1), max_size=30)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@given(tokens=some_tokens, size=st.integers(1, 5))
def test_pieces_join_to_the_decoded_text(kind: str, tokens: list[int], size: int) -> None:
    tok = tokenizer(kind)
    stream = TextStream(tok)
    assert "".join(chunked(stream, tokens, size)) == tok.decode(tokens)
    assert stream.stop_string is None


@given(
    text=st.text(alphabet="abé ", max_size=25),
    stops=st.lists(st.text(alphabet="abé ", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 4),
    spell=st.booleans(),
)
@example(text="ab", stops=["b", "a"], size=4, spell=True)
@example(text="aba", stops=["aba", "b"], size=4, spell=True)
@example(text="aab ", stops=["b", "aab"], size=4, spell=True)
@example(text="abé ", stops=["abé a", "é"], size=1, spell=True)
def test_stop_strings(text: str, stops: list[str], size: int, spell: bool) -> None:
    tok = tokenizer()
    data = text.encode()
    tokens = [tok.encode_bytes(bytes([b]))[0] for b in data] if spell else tok.encode_bytes(data)
    stream, out = TextStream(tok, stop=stops), ""
    for at in range(0, len(tokens), size):
        out += stream.push(tokens[at : at + size])
        assert stream.stop_string is not None or out == showable(tok.bytes_of(tokens[: at + size]), stops)
    out += stream.finish()
    assert (out, stream.stop_string) == first_completed(text, stops)
    assert stream.finish() == "" and (stream.stop_string is None or stream.push(tokens) == "")


@pytest.mark.parametrize(("data", "shown"), [(b"\xf0\x9fx", "\ufffd"), (b"x", ""), (b"\xf0\x9f\x98", "")])
def test_half_a_character_is_shown_where_no_more_can_come(data: bytes, shown: str) -> None:
    stream = TextStream(tokenizer(), stop=["x"])
    assert stream.push(tokenizer().encode_bytes(data)) == shown
    assert stream.finish() == ("" if b"x" in data else "\ufffd")


def test_special_tokens_contribute_no_text() -> None:
    tok = tokenizer()
    end = tok.special_id("<|im_end|>")
    assert end is not None
    stream = TextStream(tok, stop=["|im_end|"])
    assert stream.push([*tok.encode("a"), end]) + stream.finish() == "a"
    assert stream.stop_string is None


@pytest.mark.parametrize("stop", ["", [""], ["x", ""], "\ud800", ["\ud800"]])
def test_bad_stop_strings(stop: str | list[str]) -> None:
    with pytest.raises(RequestError, match="of one character or more, without lone surrogates"):
        Request.of({"stop": stop})
    with pytest.raises(TokenizerError):
        TextStream(tokenizer()).push([10**6])


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_control_token_ends_the_text_if_it_is_a_stop_string(size: int) -> None:
    tok = tokenizer()
    end, start = tok.special_id("<|im_end|>"), tok.special_id("<|im_start|>")
    assert end is not None and start is not None
    tokens = [*tok.encode("ab\n"), start, *tok.encode("c\n"), end, *tok.encode("d")]
    for stop, text in {"<|im_end|>": "ab\nc\n", "\n<|im_end|>": "ab\nc", "b\n<|im_start|>": "a"}.items():
        stream = TextStream(tok, stop=["no", stop])
        assert ("".join(chunked(stream, tokens, size)), stream.stop_string) == (text, stop)
    for stop in ("|>", "x<|im_end|>", "<|endoftext|>"):  # texts that control tokens are not, or others
        stream = TextStream(tok, stop=[stop])
        assert ("".join(chunked(stream, tokens, size)), stream.stop_string) == ("ab\nc\nd", None)
