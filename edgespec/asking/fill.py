"""Filling in the middle: the prompt of a model for the text around a hole.

The prompt is ``<prefix> far <suffix> behind <middle> near``: the last lines before the cursor begin the
middle, as if the model had written them (Bavarian et al., 2022, arXiv 2207.14255, section 3, SPM). So only
newly typed text is read; the suffix is read again when a block of lines moves on.
"""

from dataclasses import replace
from itertools import chain
from typing import Final

from edgespec.asking.request import Hole, Request, begun, check_for_text
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer

_NEAR_LINES: Final = 32
_CONTROL_TOKENS: Final = 4  # BOS and three marks
_LONGEST_WORD: Final = 16  # bytes
_BLOCKS: Final = 8  # a cut moves by an eighth of the room, and not at each keystroke
_MARKS: Final = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<｜fim▁begin｜>", "[PREFIX]"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<｜fim▁hole｜>", "[SUFFIX]"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<｜fim▁end｜>"),
    "file": ("<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "repository": ("<|repo_name|>", "<repo_name>", "<|fim_repo|>"),
}
"""The marks before each part, in Qwen2.5-Coder (arXiv 2409.12186), CodeGemma, StarCoder2, Granite,
DeepSeek-Coder and Codestral (mistral-common, ``encode_fim``). Codestral reads the suffix first and has no
mark before the middle."""


def fill_tokens(bundle: Bundle, hole: Hole, request: Request, longest: int) -> tuple[list[int], Hole]:
    """The tokens that a target reads for a hole, fewer than ``longest``, and the hole with all fields.

    The last token of an unfinished line is held back, with the word that it ends, because the model may write
    this word in other tokens. At most half of the context is kept for the answer.

    Raises:
        RequestError: the model has no tokens for fills, or the request has options of chats.
    """
    check_for_text(request)
    if request.special:
        raise RequestError("is for text prompts; leave it out", "special")
    tokenizer, marks = bundle.tokenizer, _marks(bundle)
    if not fills(bundle):
        name = bundle.manifest.name
        raise RequestError(
            f"{name} has no tokens for fills; use a model with some, such as qwen2.5-coder-1.5b-instruct"
        )
    room = longest - min(request.max_new_tokens, longest // 2) - _CONTROL_TOKENS
    extra = _extra(hole, marks, tokenizer, room // 2)
    behind = tokenizer.encode_bytes(hole.suffix.encode())[: max(0, room - len(extra)) // 3]
    lines = hole.prefix.split("\n")
    split = (len(lines) - 1) // _NEAR_LINES * _NEAR_LINES
    far = tokenizer.encode_bytes("".join(f"{line}\n" for line in lines[:split]).encode())
    near = tokenizer.encode_bytes("\n".join(lines[split:]).encode())
    held = _taken_back(tokenizer, near) if hole.line and request.response_format is None else b""
    room -= len(extra) + len(behind)
    block = max(1, room // _BLOCKS)
    cut = -(min(0, room - len(far) - len(near)) // block) * block
    far, near = far[cut:], near[max(0, cut - len(far)) :]
    before, behind = [marks["prefix"], *far], [marks["suffix"], *behind]
    around = [*behind, marks["prefix"], *extra, *far, *near]
    if "middle" in marks:
        around = [*extra, *before, *behind, marks["middle"], *near]
    return begun(bundle, around), replace(hole, held=held, ends=frozenset(tokenizer.fim_ids.values()))


def fills(bundle: Bundle) -> bool:
    """Whether the model has tokens for fills."""
    return {"prefix", "suffix"} <= _marks(bundle).keys()


def _marks(bundle: Bundle) -> dict[str, int]:
    ids = bundle.tokenizer.fim_ids
    return {kind: ids[text] for kind, texts in _MARKS.items() for text in texts if text in ids}


def _taken_back(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    """Remove the tokens of the last word, and return their bytes."""
    held = tokenizer.token_bytes(tokens.pop())
    while held[:1].isalpha() and tokenizer.bytes_of(tokens[-1:])[-1:].isalpha() and len(held) < _LONGEST_WORD:
        held = tokenizer.token_bytes(tokens.pop()) + held
    return held


def _extra(hole: Hole, marks: dict[str, int], tokenizer: Tokenizer, room: int) -> list[int]:
    """The tokens of other files, in the model's form; the last files that fit whole."""
    begin, end, form = list[int](), list[int](), "# {}\n{}\n\n"
    if "file" in marks:
        form, end = "{}\n{}\n", [marks["file"], *tokenizer.encode_bytes(b"file\n")]
    if "repository" in marks:
        begin = [marks["repository"], *tokenizer.encode_bytes(b"repository\n")]
    room, kept = room - len(begin) - len(end), list[list[int]]()
    for file in reversed(hole.extra):
        tokens = [*end[:1], *tokenizer.encode_bytes(form.format(*file).encode())]
        room -= len(tokens)
        if room < 0:
            break
        kept.append(tokens)
    return [*begin, *chain.from_iterable(reversed(kept)), *end] if kept else []
