"""Forms of answers: JSON that fits a schema, a regular expression, a grammar, one of several texts.

A request names its form with ``response_format``. llguidance (the extra ``structured``) compiles it and
says which tokens may come next; a :class:`GrammarConstraint` applies that to one request.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.decoding.draft import Draft
from edgespec.decoding.sampling import RowStep
from edgespec_models.errors import RequestError
from edgespec_models.schema import Checked, length, matching
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.kv_cache import shared_length

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from edgespec.decoding.schemas import PreparedSchema

_MAX_LEXER_STATES: Final = 50_000  # of one or two kilobytes
_MAX_GRAMMAR_SIZE: Final = 20_000  # symbols; an object of many optional properties takes their square in time

_NAMING: Final = {"properties", "items", "prefixItems", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"}
_ONE_SPACE: Final = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
"""The spacing where a schema names no properties. Models that want a space behind a brace, and may not write
it, choose another token with the name's beginning, and so another name."""
_LOG: Final = logging.getLogger("edgespec")
_Text = Annotated[str, matching(r"(?s)[^\ud800-\udfff]*", "without lone surrogates")]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammars for llguidance. The first is the answer's; the others have names.

    ``schemas`` are the schemas within, by the name of the tool whose arguments they describe; "" is the
    answer's.
    """

    parts: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, "PreparedSchema"] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The grammars as llguidance reads them."""
        return json.dumps({"grammars": self.parts}, allow_nan=False)


@dataclass(frozen=True, slots=True)
class JsonSchema(Checked):
    """JSON that fits a schema, on one line, spaced like ``json.dumps``, properties in the schema's order.

    A schema that names no properties leaves each space to the model.

    Annotations and unknown formats are ignored. Keywords that a grammar cannot hold, such as ``uniqueItems``,
    are checked after the answer where that is possible: see ``schema_problems`` of
    :class:`~edgespec.answering.results.GenerationStats`. The schema may hold llguidance's options as
    ``x-guidance``; ``{"whitespace_flexible": True}`` leaves the spacing to the model.

    Attributes:
        schema: the schema, as an object or as text.
        strict: refuse a schema that the grammar does not hold whole.
    """

    schema: Mapping[str, Any] | str
    strict: bool = False

    def grammar(self) -> Grammar:
        """For llguidance.

        Raises:
            RequestError: the schema is not a JSON object.
        """
        from edgespec.decoding.schemas import PreparedSchema

        try:
            schema = json.loads(self.schema) if isinstance(self.schema, str) else self.schema
            if not isinstance(schema, Mapping):
                raise TypeError(f"it is a {type(schema).__name__}")
            spacing = {} if _NAMING & schema.keys() else {"x-guidance": _ONE_SPACE}
            prepared = PreparedSchema({**spacing, **schema}, strict=self.strict)
            return Grammar([{"json_schema": prepared.grammar}], {"": prepared})
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"has a schema that is no JSON object ({error}); give one, or its text"
            raise RequestError(problem, "response_format") from error


@dataclass(frozen=True, slots=True)
class AnyJson:
    """A JSON object of any shape, on one line; for any JSON at all there is ``JsonSchema({})``."""

    def grammar(self) -> Grammar:
        """For llguidance."""
        return JsonSchema({"type": "object"}).grammar()


@dataclass(frozen=True, slots=True)
class Regex(Checked):
    r"""Text that matches a regular expression as a whole.

    Attributes:
        pattern: in the syntax of Rust's regex crate, without anchors, look-around and back-references.
            ``.`` is any character but a line's end; ``\d`` and ``\w`` know all scripts.
    """

    pattern: _Text

    def grammar(self) -> Grammar:
        """For llguidance."""
        from llguidance import regex_to_lark

        return Lark(f"start: /{regex_to_lark(self.pattern, '')}/").grammar()


@dataclass(frozen=True, slots=True)
class Lark(Checked):
    """Text of a context-free grammar. Its first rule is ``start``.

    Attributes:
        text: in llguidance's variant of Lark's syntax, where ``%json {...}`` stands for JSON of a schema.
            Rules with ``max_tokens`` or ``stop`` are refused: they cannot be rolled back.
    """

    text: _Text

    def grammar(self) -> Grammar:
        """For llguidance."""
        return Grammar([{"lark_grammar": self.text}])


@dataclass(frozen=True, slots=True)
class Choice(Checked):
    """One of several texts, at least one."""

    texts: Annotated[Sequence[_Text], length(1)]

    def grammar(self) -> Grammar:
        """For llguidance."""
        texts = " | ".join(json.dumps(text) for text in self.texts)
        return Lark(f"start: TEXT\nTEXT: {texts}").grammar()  # thousands of texts are cheap in a terminal


ResponseFormat = JsonSchema | Regex | Lark | Choice | AnyJson


class Compilable(Protocol):
    """A form of answers that llguidance can compile: a :data:`ResponseFormat`, calls of tools, or either."""

    def grammar(self) -> Grammar:
        """The grammar for llguidance. RequestError if there is none."""


class Allowed:
    """The tokens that may come next, at least one.

    ``mask`` has a bit for each token of the vocabulary, the lowest id first, in words of 32 bits.
    """

    def __init__(self, mask: bytes) -> None:
        self._words = np.frombuffer(mask, "<u4")

    @classmethod
    def where(cls, bits: npt.NDArray[np.bool_]) -> "Allowed":
        """The tokens whose bit in ``bits`` is set."""
        packed = np.packbits(bits, bitorder="little").tobytes()
        return cls(packed + bytes(-len(packed) % 4))

    def __contains__(self, token: int) -> bool:
        return bool(self._words[token >> 5] >> (token & 31) & 1)

    @property
    def tokens(self) -> list[int]:
        """The allowed ids, ascending."""
        return [int(token) for token in np.flatnonzero(self._bits())]

    @property
    def only(self) -> int | None:
        """The only allowed token, or None if there are several."""
        (at,) = np.nonzero(self._words)
        if len(at) != 1 or int(self._words[at[0]]).bit_count() != 1:
            return None
        return 32 * int(at[0]) + int(self._words[at[0]]).bit_length() - 1

    def forbid_others(self, row: npt.NDArray[np.float32]) -> None:
        """Set the logits of all other tokens, float32 ``(vocab,)``, to minus infinity.

        If the row has none of the tokens, it stays: only an end is allowed, and the model has none.
        """
        bits = self._bits()[: len(row)]
        if bits.any():
            np.copyto(row[: len(bits)], -np.inf, where=bits == 0)
            row[len(bits) :] = -np.inf

    def _bits(self) -> npt.NDArray[np.uint8]:
        return np.unpackbits(self._words.view(np.uint8), bitorder="little")


class Constraint(RowStep, Protocol):
    """A :class:`RowStep` that holds one request's answer to its form.

    It follows the committed tokens and reads proposals behind them. Use it in one thread at a time.
    ``schemas`` has the schemas of its :class:`Grammar`.
    """

    schemas: Mapping[str, "PreparedSchema"] = MappingProxyType({})

    @property
    def broken(self) -> str:
        """Why the form could not be followed to its end; then only an ending token is allowed."""
        return ""

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether only a token that ends the text can follow ``tokens``, all committed tokens."""

    def completes(self, drafted: Sequence[int]) -> bool:
        """Whether only an ending token can follow the committed tokens and ``drafted``, which are allowed."""

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        """The tokens that may follow.

        Raises:
            RequestError: the grammar allows no first token, or finds none in time.
        """

    def fit(self, forced: Draft, more: Draft, limit: int) -> Draft:
        """Cut and extend a draft so that it fits the form, to at most ``limit`` tokens.

        The result is ``forced``, then the allowed beginning of ``more``, then tokens that are forced there. A
        forced token has the confidence 1, because no other is allowed. The token that completes the text is
        not proposed: the pass that verifies the draft gives it anyway.
        """
        tokens, sources, confidence = list(forced.tokens), list(forced.sources), list(forced.confidence)
        proposals = zip(more.tokens, more.sources, more.confidence, strict=False)
        while len(tokens) < limit:
            allowed = self.allowed(tokens)
            token, source, sure = next(proposals, (None, "", 0.0))
            if (only := allowed.only) is not None:
                if token != only:
                    proposals = zip((), (), (), strict=False)  # they go on behind another token
                token, source, sure = only, "grammar", 1.0
            if token is None or token not in allowed or self.completes([*tokens, token]):
                break
            tokens.append(token)
            sources.append(source)
            confidence.append(sure)
        return Draft(tuple(tokens), tuple(sources), tuple(confidence))


class GrammarConstraint(Constraint):
    """Holds an answer to a grammar. Its findings about a proposal are kept for verification.

    Text that the grammar forces is written in the tokens that the tokenizer would take for it, because a
    model expects these: of several ways to spell it only one is allowed.

    ``matcher`` is llguidance's, at the empty text. The tokens ``ends`` end a text.
    """

    def __init__(
        self, matcher: "LLMatcher", ends: Collection[int], schemas: Mapping[str, "PreparedSchema"]
    ) -> None:
        self._matcher, self._ends, self.schemas = matcher, ends, schemas
        self._prompt_length: int | None = None
        self._committed: list[int] = []
        self._ended, self._broken = False, ""
        self._read: list[int] = []  # committed tokens and proposals that the matcher has read
        # By the number of these tokens: what is allowed next, once asked; whether the text is complete.
        self._allowed: list[Allowed | None] = [None]
        self._complete = [False]

    @property
    def broken(self) -> str:
        return self._broken

    def try_out(self) -> None:
        """Check that the grammar compiled, can begin, and can be rolled back.

        Raises:
            RequestError: llguidance's message, if it does not.
        """
        first = next((token for token in self.allowed(()).tokens if token not in self._ends), None)
        if first is not None:
            self._move([first])
            self._move([])
            self._check()

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a round behind ``tokens``, all committed tokens. In the first round they are the prompt."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        answer = list(tokens[self._prompt_length :])
        self._ended = bool(answer) and answer[-1] in self._ends
        self._committed = answer[:-1] if self._ended else answer
        # Tokens read behind them stay read: verification asks for them again.
        if self._read[: len(self._committed)] != self._committed:
            self._move(self._committed)

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` may begin a text. The constraint is behind an empty text then."""
        self._prompt_length, self._ended, self._committed = 0, False, []
        self._move([])
        return bool(self._matcher.validate_tokens([*tokens]) == len(tokens))

    def ends(self, tokens: Sequence[int]) -> bool:
        self.begin(tokens)
        return self._ended or bool(self.broken) or self._complete[len(self._committed)]

    def completes(self, drafted: Sequence[int]) -> bool:
        if drafted and drafted[-1] in self._ends:
            return True
        wanted = [*self._committed, *drafted]
        if self._read[: len(wanted)] != wanted:
            self._move(wanted)
        return bool(self.broken) or self._complete[len(wanted)]

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        wanted = [*self._committed, *drafted]
        known = self._allowed[len(wanted)] if self._read[: len(wanted)] == wanted else None
        if known is None:
            self._move(wanted)
            known = Allowed(self._matcher.compute_bitmask())
            self._check()
            if self.broken:
                return Allowed.where(np.isin(np.arange(max(self._ends) + 1), [*self._ends]))
            self._allowed[len(wanted)] = known
        return known

    def apply(self, row: npt.NDArray[np.float32], drafted: Sequence[int]) -> None:
        """Forbid what may not follow ``drafted``; see :class:`~edgespec.decoding.sampling.RowStep`."""
        if not (drafted and drafted[-1] in self._ends):  # what follows an end is dropped
            self.allowed(drafted).forbid_others(row)

    def _move(self, wanted: list[int]) -> None:
        """Move the matcher to the state behind ``wanted``; a broken one stays."""
        if self.broken:
            return
        shared = shared_length(self._read, wanted)
        if shared < len(self._read):
            self._matcher.rollback(len(self._read) - shared)
            del self._read[shared:], self._allowed[shared + 1 :], self._complete[shared + 1 :]
        for token in wanted[shared:]:
            self._matcher.consume_token(token)
            self._check()
            if self.broken:
                return
            self._read.append(token)
            self._allowed.append(None)
            self._complete.append(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error() and not self.broken:
            error = _refused(self.schemas, self._matcher.get_error())
            if not self._committed:
                raise error
            self._broken = f"the answer ends early: {error}"  # what has been written is not lost


class Grammars:
    """Compiles response formats for a model whose tokens ``eos`` end a text. Threads may share it.

    The first format prepares the model's vocabulary, which takes a part of a second and is kept.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        self._tokenizer, self._eos, self._lock = tokenizer, tuple(eos), Lock()
        self._logged = set[str]()  # keywords that are in the log already
        # llguidance wants an end: a model without one gets an id that it cannot write.
        self._ends = frozenset(eos or (tokenizer.vocab_size,))

    def constraint(self, wanted: Compilable) -> GrammarConstraint:
        """The constraint for one request's answer.

        Raises:
            RequestError: llguidance is not installed, or it refuses the format.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise RequestError(
                'needs the package llguidance: pip install "edgespec[structured]"', "response_format"
            ) from error
        from edgespec.decoding.schemas import check_length

        grammar = wanted.grammar()
        text, schemas = grammar.text, grammar.schemas
        check_length(len(text))
        with self._lock:
            vocabulary = self._vocabulary
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        constraint = GrammarConstraint(matcher, self._ends, schemas)
        constraint.try_out()
        if matcher.get_grammar_warnings():
            for schema in schemas.values():
                schema.warned(_verdict(schema)[1])
        self._tell(schemas)
        return constraint

    def _tell(self, schemas: Mapping[str, "PreparedSchema"]) -> None:
        """Refuse strict schemas that the grammar does not hold whole; log keywords that it lacks, once."""
        for name, schema in schemas.items():
            if schema.strict and schema.unheld:
                rules = ", ".join(map(str, schema.unheld))
                raise _unheld(
                    name, f"cannot be followed strictly: no grammar holds {rules}; leave it out, or strict"
                )
        new = {part.keyword for schema in schemas.values() for part in schema.unheld} - self._logged
        if new:
            self._logged |= new
            _LOG.warning(
                "schemas have %s, which no grammar holds; stats.schema_problems says what an answer breaks",
                ", ".join(sorted(new)),
            )

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        vocabulary: Any = _GrammarTokens(self._tokenizer, self._eos)
        return LLTokenizer(vocabulary, eos_token=[*self._ends])


class _GrammarTokens:
    """A tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = eos[0] if eos else None
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = sorted({*filter(tokenizer.is_special, ids), *eos})

    def __call__(self, text: str) -> list[int]:
        """The tokens of a forced ``text``: exactly its bytes."""
        return self._tokenizer.encode_bytes(text.encode())


def _unheld(name: str, problem: str) -> RequestError:
    """The error of a tool's schema, or of the answer's."""
    if name:
        return RequestError(f"has {name!r:.80}, whose schema {problem}", "tools")
    return RequestError(problem, "response_format")


def _verdict(schema: "PreparedSchema") -> tuple[bool, list[str]]:
    """Whether llguidance refuses a schema alone, and what it says."""
    from llguidance import LLMatcher

    text = Grammar([{"json_schema": schema.grammar}]).text
    is_wrong, warnings = LLMatcher.validate_grammar_with_warnings(text)
    return is_wrong, list(warnings)


def _refused(schemas: Mapping[str, "PreparedSchema"], error: str) -> RequestError:
    """The error of a grammar that does not compile; it names the schema that is the cause, if one is."""
    for name, schema in schemas.items():
        is_wrong, warnings = _verdict(schema)
        if is_wrong:
            return _unheld(name, f"cannot be followed: {' '.join(warnings)[:1000]}")
    error = error.removesuffix("<non-verbose/>").strip()
    error = error.replace("NoExtensionBias", "no text of this vocabulary fits it")
    return _unheld("", f"cannot be followed: {error[:1000]}")
