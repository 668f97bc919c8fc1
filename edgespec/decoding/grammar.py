"""What an answer may be: JSON that fits a schema, a regular expression, a grammar, one of several texts.

A request says so with ``response_format``. llguidance (the extra ``structured``) compiles it, and tells
which tokens may come next behind every text; :mod:`edgespec.decoding.constraint` follows one request with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Final

from edgespec.decoding.constraint import Constraint
from edgespec_models.errors import RequestError
from edgespec_models.schema import check_fields, form, length
from edgespec_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["AnyJson", "Choice", "Grammars", "JsonSchema", "Lark", "Regex", "ResponseFormat"]

_LONGEST: Final = 262_144
"""Characters of a format, at most."""
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""What ``json.dumps`` writes. Models know it well, and unlike free whitespace it cannot go on forever."""
_MAX_LEXER_STATES: Final = 50_000  # of one or two kilobytes
_MAX_GRAMMAR_SIZE: Final = 20_000  # symbols; an object of many optional properties takes their square in time

_Text = Annotated[str, form(r"(?s)[^\ud800-\udfff]*", "without lone surrogates")]


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that fits a schema, on one line, spaced as ``json.dumps`` does; properties come in its order.

    llguidance says which parts of JSON Schema it knows; what it does not know is an error. Its options may
    stand in the schema as ``x-guidance`` and replace that spacing: with ``{"whitespace_flexible": True}`` the
    model spaces as it likes.

    Attributes:
        schema: the schema, as an object or as text.
    """

    schema: Mapping[str, Any] | str

    def __post_init__(self) -> None:
        check_fields(self)

    def grammar(self) -> str:
        """For llguidance.

        Raises:
            RequestError: the schema is not a JSON object.
        """
        try:
            schema = json.loads(self.schema) if isinstance(self.schema, str) else self.schema
            if not isinstance(schema, Mapping):
                raise TypeError(f"it is a {type(schema).__name__}")
            return _grammars({"json_schema": {"x-guidance": _SPACING, **schema}})
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON object ({error}); give one, or its text") from error


@dataclass(frozen=True, slots=True)
class AnyJson:
    """A JSON object of any shape, on one line; for any JSON at all there is ``JsonSchema({})``."""

    def grammar(self) -> str:
        """For llguidance."""
        return JsonSchema({"type": "object"}).grammar()


@dataclass(frozen=True, slots=True)
class Regex:
    r"""Text that matches a regular expression from its beginning to its end.

    Attributes:
        pattern: in the syntax of Rust's regex crate, without anchors, look-around and back-references.
            ``.`` is any character but a line's end; ``\d`` and ``\w`` know all scripts.
    """

    pattern: _Text

    def __post_init__(self) -> None:
        check_fields(self)

    def grammar(self) -> str:
        """For llguidance."""
        from llguidance import regex_to_lark

        return Lark(f"start: /{regex_to_lark(self.pattern, '')}/").grammar()


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar, whose first rule is ``start``.

    Attributes:
        text: in llguidance's variant of Lark's syntax, where ``%json {...}`` stands for JSON of a schema.
            Rules with ``max_tokens`` or ``stop`` are refused: they cannot be rolled back.
    """

    text: _Text

    def __post_init__(self) -> None:
        check_fields(self)

    def grammar(self) -> str:
        """For llguidance."""
        return _grammars({"lark_grammar": self.text})


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts.

    Attributes:
        texts: those, at least one.
    """

    texts: Annotated[Sequence[_Text], length(1)]

    def __post_init__(self) -> None:
        check_fields(self)

    def grammar(self) -> str:
        """For llguidance."""
        texts = " | ".join(json.dumps(text) for text in self.texts)
        return Lark(
            f"start: TEXT\nTEXT: {texts}"
        ).grammar()  # a terminal, of which thousands of texts are cheap


ResponseFormat = JsonSchema | Regex | Lark | Choice | AnyJson


class Grammars:
    """Compiles response formats for one model. Safe to share between threads.

    The first one prepares the model's vocabulary, which takes a part of a second and is kept.

    Args:
        tokenizer: the model's.
        eos: its tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        self._tokenizer, self._eos, self._lock = tokenizer, tuple(eos), Lock()
        # llguidance wants an end: a model without one gets an id that it cannot write.
        self._ends = frozenset(eos or (tokenizer.vocab_size,))

    def constraint(self, wanted: ResponseFormat) -> Constraint:
        """What one request's answer may be.

        Raises:
            RequestError: llguidance is not installed, or it refuses the format; with its message.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise RequestError(
                'response_format needs the package llguidance: pip install "edgespec[structured]"'
            ) from error
        text = wanted.grammar()
        if len(text) > _LONGEST:
            raise RequestError(
                f"the response_format has {len(text)} characters; allowed: {_LONGEST}; give a shorter one"
            )
        with self._lock:
            vocabulary = self._vocabulary
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        constraint = Constraint(LLMatcher(vocabulary, text, log_level=0, limits=limits), self._ends)
        constraint.try_out()
        return constraint

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        vocabulary: Any = _GrammarTokens(self._tokenizer, self._eos)
        return LLTokenizer(vocabulary, eos_token=[*self._ends])


class _GrammarTokens:
    """A tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = eos[0] if eos else None
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = sorted({*filter(tokenizer.is_special, ids), *eos})

    def __call__(self, text: str) -> list[int]:
        """The tokens that a forced ``text`` is to be written with: those of exactly its bytes."""
        return self._tokenizer.encode_bytes(text.encode())


def _grammars(grammar: Mapping[str, Any]) -> str:
    """As llguidance reads them: a list, here of one."""
    return json.dumps({"grammars": [grammar]}, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")
