from collections.abc import Callable
from functools import partial
from itertools import permutations, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.bridge import ByteBridge, IdentityBridge, encode_after, safe_start
from edgespec_models.errors import TokenizerError
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.kv_cache import shared_length
from tests.kit.drafters import tokenizer
from tests.kit.tokenizers import CORPUS, sentencepiece_json

KINDS = ("byte", "small byte", "sentencepiece", "prefixed")
PAIRS = list(permutations(KINDS, 2))
TEXT = "\n".join(CORPUS * 3)


def _bridge(target: str, drafter: str, *, prompt: int = 3) -> ByteBridge:
    drafter_prompt = tokenizer(drafter).encode("the prompt")
    return ByteBridge(
        tokenizer(target), tokenizer(drafter), prompt_length=prompt, drafter_prompt=drafter_prompt
    )


def _generated(bridge: ByteBridge, drafter: str, tokens: list[int]) -> list[int]:
    """What ``align`` puts behind the drafter's prompt, after checking that the prompt is there."""
    prompt = tokenizer(drafter).encode("the prompt")
    ids = bridge.to_drafter(tokens)
    assert ids[: len(prompt)] == prompt
    return ids[len(prompt) :]


pairs = st.sampled_from(PAIRS)
texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="the quick,brown \n\t1", max_size=200),
    st.builds(lambda a, b: TEXT[a : a + b], st.integers(0, len(TEXT)), st.integers(0, 200)),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[str, str], list[list[int]]]:
    """A pair of vocabularies, and target tokens growing, shrinking and changing from call to call."""
    pair = draw(pairs)
    target = tokenizer(pair[0])
    any_id = st.integers(0, target.vocab_size - 1)  # special tokens, padding, parts of characters
    calls, tokens = [], list[int]()
    for _ in range(draw(st.integers(1, 8))):
        keep = len(tokens) if draw(st.booleans()) else draw(st.integers(0, len(tokens)))
        more = draw(st.one_of(st.lists(any_id, max_size=8), texts.map(target.encode)))
        tokens = [*tokens[:keep], *more]
        calls.append(tokens)
    return pair, calls


@settings(max_examples=300, deadline=None)
@given(histories())
def test_aligned_tokens_spell_the_committed_bytes(history: tuple[tuple[str, str], list[list[int]]]) -> None:
    (target, drafter), calls = history
    bridge = _bridge(target, drafter)
    for tokens in calls:
        expected = tokenizer(target).bytes_of(tokens)
        ids = _generated(bridge, drafter, [1, 2, 3, *tokens])
        assert tokenizer(drafter).bytes_of(ids) == expected
        fresh = _generated(_bridge(target, drafter), drafter, [1, 2, 3, *tokens])
        assert tokenizer(drafter).bytes_of(fresh) == expected
        assert fresh == tokenizer(drafter).encode_bytes(expected)
        assert _generated(bridge, drafter, [1, 2, 3, *tokens]) == ids


@settings(max_examples=300, deadline=None)
@given(histories(), st.data())
def test_translated_tokens_spell_the_drafted_bytes(
    history: tuple[tuple[str, str], list[list[int]]], data: st.DataObject
) -> None:
    (target, drafter), calls = history
    bridge = _bridge(target, drafter)
    any_id = st.integers(0, tokenizer(drafter).vocab_size - 1)
    for tokens in calls:
        bridge.to_drafter([1, 2, 3, *tokens])
        drafted = data.draw(st.one_of(st.lists(any_id, max_size=6), texts.map(tokenizer(drafter).encode)))
        _check_translation(bridge, target, drafter, drafted)


def _check_translation(bridge: ByteBridge, target: str, drafter: str, drafted: list[int]) -> list[int]:
    translated = bridge.to_target(drafted)
    ids = [token for token, _ in translated]
    assert tokenizer(target).bytes_of(ids) == tokenizer(drafter).bytes_of(drafted)
    counts = [count for _, count in translated]
    assert counts == sorted(counts)
    for index, count in enumerate(counts):
        # Just enough: with one drafter token less, the bytes would not reach so far.
        needed = tokenizer(target).bytes_of(ids[: index + 1])
        assert tokenizer(drafter).bytes_of(drafted[:count]).startswith(needed)
        assert not tokenizer(drafter).bytes_of(drafted[: count - 1]).startswith(needed)
    return ids


@pytest.mark.parametrize("between", [" ", "\n"])
@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_ordinary_text_token_by_token_is_encoded_canonically(target: str, drafter: str, between: str) -> None:
    bridge = _bridge(target, drafter)
    tokens = tokenizer(target).encode_bytes(TEXT.replace(" ", between).encode())
    canonical = 0
    for end in range(len(tokens) + 1):
        ids = _generated(bridge, drafter, [1, 2, 3, *tokens[:end]])
        canonical += ids == tokenizer(drafter).encode_bytes(tokenizer(target).bytes_of(tokens[:end]))
    assert canonical > 0.98 * len(tokens)


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_the_right_words_translate_into_the_target_s_own_tokens(target: str, drafter: str) -> None:
    bridge = _bridge(target, drafter)
    tokens = tokenizer(target).encode_bytes(TEXT.encode())
    right = asked = 0
    for end in range(1, len(tokens) - 20, 3):
        bridge.to_drafter([1, 2, 3, *tokens[:end]])
        behind = TEXT.encode()[len(tokenizer(target).bytes_of(tokens[:end])) :]
        drafted = tokenizer(drafter).encode_bytes(behind[:60])[:6]
        ids = _check_translation(bridge, target, drafter, drafted)
        # More bytes could change the last token; those before it are settled, but for rare merges.
        right += ids[:-1] == tokens[end : end + len(ids) - 1]
        asked += 1
    assert right > 0.7 * asked


def test_work_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = _bridge("byte", "sentencepiece")
    tokens = tokenizer("byte").encode(TEXT * 10)
    bridge.to_drafter([1, 2, 3, *tokens])
    sizes: list[int] = []

    def counted(encode: Callable[[bytes], list[int]], data: bytes) -> list[int]:
        sizes.append(len(data))
        return encode(data)

    for kind in ("byte", "sentencepiece"):
        side = tokenizer(kind)
        monkeypatch.setattr(side, "encode_bytes", partial(counted, side.encode_bytes))
    bridge.to_drafter([1, 2, 3, *tokens, *tokens[:5]])
    bridge.to_target(tokenizer("sentencepiece").encode("the quick"))
    assert max(sizes) < 200
    assert sizes[2:] == [len(" quick")]
    assert sizes[1] > len("the")  # with the word to its left
    sizes.clear()
    bridge.to_target(tokenizer("sentencepiece").encode("the quick brown"))
    assert sizes == [len(" brown")]


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_draft_that_grows_is_translated_like_one_that_is_there(target: str, drafter: str) -> None:
    tokens = tokenizer(target).encode_bytes(TEXT.encode())
    growing = _bridge(target, drafter)
    for end in range(1, len(tokens) - 20, 7):
        whole = _bridge(target, drafter)
        for bridge in (growing, whole):
            bridge.to_drafter([1, 2, 3, *tokens[:end]])
        behind = TEXT.encode()[len(tokenizer(target).bytes_of(tokens[:end])) :]
        drafted = tokenizer(drafter).encode_bytes(behind[:60])
        grown = [growing.to_target(drafted[:count]) for count in range(1, len(drafted) + 1)]
        assert grown[-1] == whole.to_target(drafted)
        assert growing.to_target(drafted[:2]) == grown[1]  # another draft of the same round


def test_nothing_generated_nothing_drafted() -> None:
    bridge = _bridge("byte", "sentencepiece", prompt=2)
    assert bridge.to_drafter([5, 6]) == tokenizer("sentencepiece").encode("the prompt")
    assert bridge.to_target([]) == []
    assert bridge.to_drafter([5, 6, 7]) != bridge.to_drafter([5, 6])


def test_a_special_token_is_its_text_to_the_other_side() -> None:
    target, drafter = tokenizer("byte"), tokenizer("sentencepiece")
    special = target.special_id("<|im_end|>")
    assert special is not None
    bridge = _bridge("byte", "sentencepiece")
    ids = _generated(bridge, "sentencepiece", [1, 2, 3, special])
    assert drafter.bytes_of(ids) == b"<|im_end|>"
    assert not any(drafter.is_special(token) for token in ids)
    eos = drafter.special_id("<eos>")
    assert eos is not None
    assert not any(target.is_special(token) for token, _ in bridge.to_target([eos]))


def test_the_callers_lists_are_not_held() -> None:
    bridge = _bridge("byte", "sentencepiece")
    tokens = [1, 2, 3, *tokenizer("byte").encode("the quick")]
    expected = bridge.to_drafter(tokens)
    held = bridge.to_drafter(tokens)
    held.clear()
    tokens.pop()
    assert len(bridge.to_drafter(tokens)) < len(expected)
    assert bridge.to_drafter([1, 2, 3, *tokenizer("byte").encode("the quick")]) == expected


def test_a_byte_the_drafter_lacks_is_named() -> None:
    """And what follows works again as soon as the byte is gone."""
    spec = sentencepiece_json().replace("<0xFF>", "<0xZZ>")
    lacking = Tokenizer.from_json(spec)
    target = tokenizer("small byte")
    bridge = ByteBridge(target, lacking, prompt_length=0, drafter_prompt=[])
    good, bad = target.encode("the quick"), target.encode_bytes(b"\xff")
    assert lacking.bytes_of(bridge.to_drafter(good)) == b"the quick"
    for _ in range(2):
        with pytest.raises(TokenizerError, match="0xFF"):
            bridge.to_drafter([*good, *bad])
    assert lacking.bytes_of(bridge.to_drafter(good)) == b"the quick"
    assert lacking.bytes_of(bridge.to_drafter([*good, *good])) == b"the quickthe quick"


@given(st.lists(st.integers(0, 999)), st.integers(1, 999), st.integers(1, 999))
def test_between_vocabularies_that_differ_in_size_alone(tokens: list[int], size: int, drafts: int) -> None:
    """Padding: a drafter proposes nothing that the target lacks, and reads nothing that it lacks itself."""
    bridge = IdentityBridge(size, drafts)
    known = list(takewhile(lambda token: token < size, tokens))
    assert bridge.to_target(tokens) == list(zip(known, range(1, len(known) + 1), strict=True))
    committed = [token % size for token in tokens]
    if max(committed, default=0) < drafts:
        aligned = bridge.to_drafter(committed)
        assert aligned == committed and aligned is not committed
    else:
        with pytest.raises(TokenizerError, match=f"no token {max(committed)}; allowed: below {drafts}$"):
            bridge.to_drafter(committed)
    assert IdentityBridge(size).to_drafter(committed) == committed


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_stands_before_a_text_its_tokens_are_its_own(kind: str) -> None:
    data = CORPUS[0].encode()
    assert encode_after(tokenizer(kind), b"", data) == tokenizer(kind).encode_bytes(data)


@given(st.text("ab \n\t", max_size=300), st.integers(1, 5), st.data())
def test_text_is_encoded_again_from_the_start_of_a_word(text: str, width: int, data: st.DataObject) -> None:
    """The last one before, or any border of tokens where there is none within 96 bytes."""
    given, ends = text.encode(), list(range(width, len(text) + 1, width))
    before = data.draw(st.integers(0, len(text)))
    borders = [end for end in ends if end < before]
    words = [
        end for end in borders if given[end : end + 1] in (b" ", b"\n") and given[end - 1] not in b" \n\t"
    ]
    start = safe_start(given, ends, before)
    near = [end for end in words if end >= before - 96]
    far = [end for end in borders if end < before - 96]
    assert start == (near or far or [0])[-1]


@given(st.integers(0, 600), st.integers(0, 300), st.integers(0, 300))
def test_texts_share_what_both_begin_with(shared: int, left: int, right: int) -> None:
    ours, theirs = [0] * shared + [1] * left, [0] * shared + [2] * right
    assert shared_length(ours, theirs) == shared_length(theirs, tuple(ours)) == shared
    assert shared_length(ours, ours) == len(ours)
