"""What a request may say, checked once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ParamSpec, TypedDict, TypeVar

from edgespec.decoding.draft import Drafter
from edgespec.decoding.grammar import AnyJson, Choice, JsonSchema, Lark, Regex, ResponseFormat
from edgespec.decoding.sampling import RowStep, SamplingParams
from edgespec.decoding.verification import Verifier
from edgespec_models.errors import RequestError
from edgespec_models.schema import check_fields, form, one_of, shown, within

__all__ = ["Request", "RequestOptions", "with_options"]

P = ParamSpec("P")
T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``chat``, ``stream``, ``stream_chat`` and their like.

    ``docs/requests.md`` has a table of them with examples; :class:`Request` and
    :class:`edgespec.decoding.sampling.SamplingParams` say what each does, its default and its range.
    """

    max_new_tokens: int
    max_tokens: int
    stop: str | Sequence[str]
    stop_at_eos: bool
    speculate: bool
    drafter: Drafter | None
    cancelled: Callable[[], bool]
    timeout: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    n: int
    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    template_args: Mapping[str, Any]
    response_format: ResponseFormat | None


_Stop = Annotated[str, form(r"[^\ud800-\udfff]+", "of one character or more, without lone surrogates")]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """:class:`RequestOptions` with defaults filled in.

    Attributes:
        max_new_tokens: at most so many tokens are generated. ``max_tokens`` is another name for it.
        stop: a text, or several, that end the answer and are no part of it.
        stop_at_eos: end where the model says that it has finished.
        speculate: False decodes without drafts; the answer is the same.
        drafter: drafts in this request, in place of the model's own drafter; None leaves it to that.
        cancelled: asked between passes, from whichever thread they run in; True ends the request.
        n: so many answers to one prompt, each with the next seed. Greedy answers are all the same one.
        logprobs: say how likely the target found each token of the answer.
        top_logprobs: and so many of the most likely tokens at each place; it needs ``logprobs``.
        tools: functions the model may ask to have called, as OpenAI's chat API has them.
        tool_choice: "auto" lets the model choose; "none" shows it no tools. With "required" the answer is a
            call of one of the tools, with ``{"type": "function", "function": {"name": ..}}`` of that one, and
            its arguments fit the tool's parameters.
        template_args: what the model's chat template is told besides, such as ``enable_thinking``.
        response_format: what the answer has to be, such as :class:`edgespec.JsonSchema`. Where it has become
            that it ends; where ``max_new_tokens`` or ``stop`` end it, it may be a part of that only.
        sampling: how tokens are chosen.

    Raises:
        RequestError: a field out of its range, or two that contradict each other.
    """

    max_new_tokens: Annotated[int, within(1, 2**31 - 1)] = 256
    stop: tuple[_Stop, ...] = ()
    stop_at_eos: bool = True
    speculate: bool = True
    drafter: Drafter | None = None
    cancelled: Callable[[], bool] = _never
    timeout: Annotated[float, within(above=0)] | None = None
    n: Annotated[int, within(1, 128)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, within(0, 20)] = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Annotated[str, one_of(("auto", "none", "required"))] | Mapping[str, Any] = "auto"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    response_format: JsonSchema | Regex | Lark | Choice | AnyJson | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tools or self.tool_choice not in ("auto", "none"):
            self._check_tools()
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}; allowed: 0, or more with logprobs=True")

    def _check_tools(self) -> None:
        from edgespec.requests.tool_calls import check_tools, must_call  # requests without tools need none

        check_tools(self.tools)
        if must_call(self.tools, self.tool_choice) and self.response_format is not None:
            raise RequestError("tool_choice and response_format both say what the answer is; give one")

    @classmethod
    def one(cls, options: RequestOptions) -> "Request":
        """:meth:`of` a stream, which is one answer.

        Raises:
            RequestError: as of; or ``n`` is more.
        """
        request = cls.of(options)
        if request.n > 1:
            raise RequestError(f"n is {request.n}; allowed: 1 for a stream; use generate or chat")
        return request

    def verifier(self, masks: Sequence[RowStep] = ()) -> Verifier:
        """What judges drafts in this request; ``masks`` change the rows besides what the sampling does."""
        return Verifier(self.sampling, masks)

    def check_vocabulary(self, size: int) -> None:
        """See that the model has the tokens that the request names.

        Raises:
            RequestError: a token of ``logit_bias`` is none of its ``size``.
        """
        beyond = max(self.sampling.logit_bias, default=0)
        if beyond >= size:
            raise RequestError(f"logit_bias is for token {beyond}; allowed: the model's, 0 to {size - 1}")

    @classmethod
    def of(cls, options: RequestOptions) -> "Request":
        """Check ``options``.

        Raises:
            RequestError: an unknown name, a value of a wrong type or out of range, or two that contradict
                each other.
        """
        given = _by_own_names(dict(options))
        sampling_names = {f.name for f in fields(SamplingParams)}
        own_names = {f.name for f in fields(cls)} - {"sampling"}
        unknown = given.keys() - sampling_names - own_names
        if unknown:
            allowed = ", ".join(sorted(RequestOptions.__annotations__))
            raise RequestError(f"unknown option {', '.join(map(shown, sorted(unknown)))}; allowed: {allowed}")
        sampling = SamplingParams(**{k: v for k, v in given.items() if k in sampling_names})
        return cls(**{k: v for k, v in given.items() if k in own_names}, sampling=sampling)


def _by_own_names(options: dict[str, Any]) -> dict[str, Any]:
    """Options whose second names and short forms are replaced by those of :class:`Request`."""
    if "max_tokens" in options:
        limit = options.pop("max_tokens")
        if options.setdefault("max_new_tokens", limit) != limit:
            raise RequestError(
                f"max_tokens is {shown(limit)} and max_new_tokens {shown(options['max_new_tokens'])}, "
                "which are two names of one option; give one of them"
            )
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    return options


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Have :func:`inspect.signature` of ``function`` show the options that its ``**options`` stand for."""
    signature = inspect.signature(function)
    others = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    shown_one = signature.replace(parameters=[*others, *_parameters()])
    function.__signature__ = shown_one  # type: ignore[attr-defined]
    return function


@cache
def _parameters() -> tuple[inspect.Parameter, ...]:
    own = {each.name: each for cls in (SamplingParams, Request) for each in fields(cls)}
    own["max_tokens"] = own["max_new_tokens"]
    return tuple(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(own[name]), annotation=kind)
        for name, kind in RequestOptions.__annotations__.items()
    )


def _default(option: Any) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()
