"""The options of a request, checked once, and its prompt as the model's tokens."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, cast

from edgespec.asking.images import with_images
from edgespec.asking.pictures import Pictures, with_markers, without_images
from edgespec.decoding.draft import Drafter, PromptProgress
from edgespec.decoding.grammar import AnyJson, Choice, Compilable, JsonSchema, Lark, Regex, ResponseFormat
from edgespec.decoding.sampling import SamplingParams
from edgespec.loading.options import ImageTokens
from edgespec_models.bundles.bundle import Bundle, Sampling
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.schema import (
    Checked,
    check_fields,
    checked,
    length,
    matching,
    one_of,
    shown,
    within,
)

if TYPE_CHECKING:  # what prompts without a conversation do not need, such as Jinja
    from edgespec.asking.tool_calls import Form
    from edgespec.drafting.prediction import PredictedText
    from edgespec_models.text.chat_template import ChatTemplate
    from edgespec_models.text.thoughts import Tags, ThoughtState
    from edgespec_models.text.tokenizer import Tokenizer


Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with ``role`` (system, developer, user, assistant, tool) and ``content``, a text
or parts: ``{"type": "text", "text": TEXT}``, and ``{"type": "image", "image": PICTURE}`` with a path, bytes
or an image of Pillow."""

PromptInput = str | Sequence[int] | Messages
"""A prompt: a text or token ids to continue, or a conversation to answer."""

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
"""How hard a model thinks."""

P = ParamSpec("P")
T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``chat``, ``stream``, ``stream_chat`` and their like.

    :class:`Request` and :class:`edgespec.decoding.sampling.SamplingParams` say what each does, its default
    and its range; ``docs/options.md`` lists them, ``docs/requests.md`` has examples.
    """

    max_new_tokens: int
    max_tokens: int
    max_lines: int | None
    stop: str | Sequence[str]
    stop_at_eos: bool
    special: bool
    speculate: bool
    drafter: Drafter | None
    prediction: str
    prompt_cache: bool
    cancelled: Callable[[], bool]
    timeout: float | None
    on_progress: Callable[[PromptProgress], None] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    sampling: Literal["recommended"] | None
    n: int
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool | None
    template_args: Mapping[str, Any]
    thinking: bool | int | Effort | None
    response_format: ResponseFormat | None
    image_tokens: int | None


_Text = Annotated[str, matching(r"[^\ud800-\udfff]*", "without lone surrogates")]
_Stop = Annotated[str, matching(r"[^\ud800-\udfff]+", "of one character or more, without lone surrogates")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """:class:`RequestOptions` with defaults filled in.

    Attributes:
        max_new_tokens: The most tokens of the answer. With 0 the prompt is read and nothing is written.
            ``max_tokens`` is another name for it.
        max_lines: The most lines of a fill, the cursor's line included.
        stop: A text, or several. The answer ends before the first that it would contain. The text of a
            control token also ends an answer that writes this token.
        stop_at_eos: End where the model ends its answer.
        special: Read the control tokens that a text prompt spells. Without it they are ordinary text.
        speculate: False decodes without drafts. The answer is the same.
        drafter: An :class:`edgespec.Drafter` that drafts in this request, in place of the model's drafter.
        prediction: A text that the answer probably repeats, whole or in parts, such as the file that it
            edits. Drafts are copied from it, also by a model that was loaded without a drafter. A wrong
            prediction costs little, and never changes the answer.
        prompt_cache: False neither writes this request's text to disk nor looks for it there.
        cancelled: A function that is called between passes and while a picture is seen, in the thread that
            runs them. The request ends when it returns True.
        timeout: Seconds that the request may take, waiting included. The answer is what was written until
            then.
        on_progress: A function that gets an :class:`edgespec.PromptProgress` while a long prompt is read, in
            the thread or task that waits for the answer. An error in it cancels the request and is raised
            there.
        n: The number of answers. Answer i has the seed ``seed + i``; greedy answers are equal, so one is
            decoded.
        logprobs: Return the log probability of each token of the answer.
        top_logprobs: The number of most likely tokens to return at each place. It needs ``logprobs`` or
            ``prompt_logprobs``.
        prompt_logprobs: Return the log probability of each token of the prompt. The prompt is then read
            whole.
        tools: Functions that the model may call, in the form of OpenAI's chat API.
        tool_choice: ``"auto"`` lets the model choose, and ``"none"`` shows it no tools. ``"required"`` asks
            for a call of any tool, ``{"type": "function", "function": {"name": NAME}}`` for a call of this
            one; the arguments then fit the tool's parameters.
        parallel_tool_calls: False ends the answer after its first call. With True a required call may be
            several calls, where the model's form of calls allows it.
        template_args: Variables of the chat template, such as ``enable_thinking``.
        thinking: Whether the model thinks before it answers, the most tokens of thoughts, or an effort. None
            leaves it to the chat template.
        response_format: The form of the answer, such as :class:`edgespec.JsonSchema`. Thoughts and calls of
            tools stand outside of it. An answer that another option ends early is a beginning of that form.
        image_tokens: Tokens of each picture in the prompt. None is ``LoadOptions.image_tokens``.
        sampling: ``"recommended"`` samples as the makers of the model advise in its files
            (``model.target.manifest.sampling``), where other options say nothing. None is greedy without
            ``temperature``.
        sampler: How tokens are chosen.

    Raises:
        RequestError: a field out of its range, or two that contradict each other.
    """

    max_new_tokens: Annotated[int, within(0, 2**31 - 1)] = 256
    max_lines: Annotated[int, within(1)] | None = None
    stop: tuple[_Stop, ...] = ()
    stop_at_eos: bool = True
    special: bool = False
    speculate: bool = True
    drafter: Drafter | None = None
    prediction: _Text = ""
    prompt_cache: bool = True
    cancelled: Callable[[], bool] = lambda: False
    timeout: Annotated[float, within(above=0)] | None = None
    on_progress: Callable[[PromptProgress], None] | None = None
    n: Annotated[int, within(1, 128)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, within(0, 20)] = 0
    prompt_logprobs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Annotated[str, one_of(("auto", "none", "required"))] | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | Effort | Annotated[int, within(0)] | None = None
    response_format: JsonSchema | Regex | Lark | Choice | AnyJson | None = None
    image_tokens: ImageTokens | None = None
    sampling: Literal["recommended"] | None = None
    sampler: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tools or self.tool_choice not in ("auto", "none"):
            from edgespec.asking.tool_calls import check_tools, must_call  # of use to tools alone

            check_tools(self.tools)
            must_call(self.tools, self.tool_choice)
        if self.top_logprobs and not (self.logprobs or self.prompt_logprobs):
            raise RequestError(
                f"is {self.top_logprobs}; allowed: 0, or more with logprobs=True or prompt_logprobs=True",
                "top_logprobs",
            )

    @classmethod
    def single(cls, options: RequestOptions, advice: Sampling | None = None) -> "Request":
        """:meth:`of` a stream, which is one answer."""
        request = cls.of(options, advice)
        if request.n > 1:
            raise RequestError(f"is {request.n}; allowed: 1 for a stream; use generate or chat", "n")
        return request

    @property
    def choices(self) -> "list[Request]":
        """One request for each answer that is to be decoded; greedy answers are equal, so one is decoded.

        Answer i has the seed ``seed + i``, so each can be repeated alone.
        """
        seed, count = self.sampler.seed, 1 if self.sampler.greedy else self.n
        seeds = [None if seed is None else (seed + i) % 2**64 for i in range(count)]
        return [replace(self, n=1, sampler=replace(self.sampler, seed=seed)) for seed in seeds]

    def check_vocabulary(self, size: int) -> None:
        """Check that the model has the tokens of the request."""
        beyond = max(self.sampler.logit_bias, default=0)
        if beyond >= size:
            raise RequestError(f"is for token {beyond}; allowed: the model's, 0 to {size - 1}", "logit_bias")

    @classmethod
    def of(cls, options: RequestOptions, advice: Sampling | None = None) -> "Request":
        """Check ``options``; ``advice`` is that of the model's makers."""
        values = _by_own_names(dict(options))
        if values.get("sampling") and advice is not None:
            values = {**advice.options(), **values}
        sampling_names = {f.name for f in fields(SamplingParams)}
        own_names = {f.name for f in fields(cls)} - {"sampler"}
        unknown = values.keys() - sampling_names - own_names
        if unknown:
            allowed = ", ".join(sorted(RequestOptions.__annotations__))
            raise RequestError(f"unknown option {', '.join(map(shown, sorted(unknown)))}; allowed: {allowed}")
        sampling = SamplingParams(**{name: values.pop(name) for name in values.keys() & sampling_names})
        return cls(**values, sampler=sampling)


def _by_own_names(options: dict[str, Any]) -> dict[str, Any]:
    """Options with second names and short forms replaced by the names and forms of :class:`Request`."""
    if "max_tokens" in options:
        limit = options.pop("max_tokens")
        if options.setdefault("max_new_tokens", limit) != limit:
            raise RequestError(
                f"is {shown(limit)} and max_new_tokens {shown(options['max_new_tokens'])}, which are two "
                "names of the same option; leave out one of them",
                "max_tokens",
            )
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    return options


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Have :func:`inspect.signature` of ``function`` show the options that its ``**options`` stand for."""
    signature = inspect.signature(function)
    others = [other for other in signature.parameters.values() if other.kind is not other.VAR_KEYWORD]
    whole = signature.replace(parameters=[*others, *_parameters()])
    function.__signature__ = whole  # type: ignore[attr-defined]
    return function


@cache
def _parameters() -> tuple[inspect.Parameter, ...]:
    own = {option.name: option for cls in (SamplingParams, Request) for option in fields(cls)}
    own["max_tokens"] = own["max_new_tokens"]
    return tuple(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(own[name]), annotation=kind)
        for name, kind in RequestOptions.__annotations__.items()
    )


def _default(option: Any) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


@dataclass(frozen=True, slots=True)
class Hole(Checked):
    """A place in a text: the texts before and behind it, and names and texts of ``extra`` files.

    ``held`` are the last bytes of the prefix, which are not read, but written again. ``ends`` end a fill.
    """

    prefix: _Text
    suffix: _Text
    extra: Sequence[tuple[_Text, _Text]] = ()
    held: bytes = b""
    ends: frozenset[int] = frozenset()

    @property
    def line(self) -> str:
        """The text before the cursor on its line."""
        return self.prefix.rpartition("\n")[2]

    @property
    def ends_line(self) -> bool:
        """Whether the end of the line ends the fill: text stands on both sides of the cursor on its line."""
        return bool(self.line and self.suffix.partition("\n")[0].strip())


@checked
def text_prompt(prompt: Annotated[str | Sequence[int], length(1)]) -> PromptInput:
    """A prompt to continue; RequestError if it is neither a text nor tokens, or empty."""
    return prompt


def chat_prompt(messages: Messages) -> PromptInput:
    """A conversation to answer; RequestError for a prompt to continue."""
    if isinstance(messages, str) or ids_of(messages) is not None:
        raise RequestError(f"is {shown(messages)}; allowed: a list of messages, or use generate", "messages")
    return messages


class PromptTokens(NamedTuple):
    """A prompt for the target and for the drafter; the second is empty without a drafter model.

    If the drafter cannot read it, ``drafter`` is the error.

    ``pictures`` are those of the target's prompt; None without.

    ``thoughts`` says whether the answer begins with them; None if the model has none. ``hole`` is the place
    that the answer fills, or None. ``prediction`` is the predicted answer, or None. ``record`` is what a
    history keeps of it, as JSON.
    """

    target: list[int]
    drafter: list[int] | Exception
    thoughts: "ThoughtState | None"
    hole: Hole | None = None
    prediction: "PredictedText | None" = None
    record: bytes | None = None
    pictures: Pictures | None = None

    @property
    def rows(self) -> list[int]:
        """The target's tokens by which it keeps keys and values."""
        return self.target if self.pictures is None else self.pictures.tokens


def prompt_tokens(bundle: Bundle, prompt: PromptInput, request: Request) -> list[int]:
    """The tokens of a prompt for a target: a text or tokens to continue, or a conversation to answer.

    Raises:
        RequestError: the prompt is empty, or the model's chat template does not take it; tools or template
            arguments for a text, which is in no template.
    """
    if request.max_lines is not None:
        raise RequestError("is for fills; use fill, or leave it out", "max_lines")
    ids = ids_of(prompt)
    if request.special and not isinstance(prompt, str):
        raise RequestError("is for text prompts; leave it out", "special")
    if isinstance(prompt, str) or ids is not None:
        check_for_text(request)
        ids = encode_text(bundle, str(prompt), special=request.special) if ids is None else ids
        most = bundle.tokenizer.vocab_size - 1
        if not all(type(id_) is int and 0 <= id_ <= most for id_ in ids):
            raise RequestError(
                f"is {shown(prompt)}; allowed: a text, or the model's ids, 0 to {most}", "prompt"
            )
    else:
        _check_thinking(bundle, request)
        ids = encode_chat(bundle, cast(Messages, prompt), _arguments(bundle, request))
    if not ids:
        raise RequestError("is empty; give at least one character", "prompt")
    return ids


def seen(bundle: Bundle, prompt: T, request: Request, image_tokens: int | None = None) -> T:
    """``prompt``, with all pictures of a conversation read; see :func:`with_images`.

    ``image_tokens`` apply where the request has none.
    """
    if isinstance(prompt, str | Hole) or ids_of(prompt) is not None or not isinstance(prompt, Sequence):
        return prompt
    return cast(T, with_images(cast(Messages, prompt), bundle, request.image_tokens or image_tokens))


def check_for_text(request: Request) -> None:
    """Raise RequestError for an option that only conversations have."""
    for name in ("tools", "template_args", "thinking", "image_tokens"):
        if getattr(request, name) not in ((), {}, None):
            raise RequestError(
                "is for conversations, and the prompt is a text; use chat, or leave it out", name
            )


def drafter_tokens(bundle: Bundle, prompt: PromptInput, request: Request) -> list[int]:
    """The tokens of a prompt for a drafter, without parts that its template cannot take: it only guesses."""
    if isinstance(prompt, str):
        return encode_text(bundle, prompt, special=request.special)
    messages, template = without_images(cast(Messages, prompt)), bundle.chat_template
    if template is not None:
        try:
            arguments = _arguments(bundle, request)
            known = {name: value for name, value in arguments.items() if name in template.arguments}
            return _chat(bundle, template, messages, known)
        except (RequestError, TokenizerError):  # it knows fewer roles, or no tool calls
            pass
    return encode_text(bundle, "".join(f"{message.get('content')}\n\n" for message in messages))


def ids_of(prompt: object) -> list[int] | None:
    """A prompt that is token ids; None for others."""
    return [*prompt] if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int) else None


def encode_text(bundle: Bundle, text: str, *, special: bool = False) -> list[int]:
    """Tokens of ``text``, with the beginning of the model's texts; ``special`` reads its control tokens."""
    return begun(bundle, bundle.tokenizer.encode(text, special=special))


def no_template(name: str) -> str:
    """The error for a model without a chat template."""
    return f"{name} has no chat template; give one (chat_template), use generate, or another model"


def encode_chat(bundle: Bundle, messages: Messages, arguments: Mapping[str, Any] | None = None) -> list[int]:
    """Tokens of a conversation in the model's own template.

    Raises:
        RequestError: the model has no template, or it does not take the messages or arguments.
    """
    template = bundle.chat_template
    if template is None:
        raise RequestError(no_template(bundle.manifest.name))
    arguments = arguments or {}
    if "tools" in arguments and "tools" not in template.arguments:
        raise RequestError(
            f"cannot be shown: {bundle.manifest.name} does not support tools; use another model, or none",
            "tools",
        )
    if "tools" in arguments and form_of(bundle) is None:
        raise RequestError(
            f"cannot be called: the chat template of {bundle.manifest.name} has a form that edgespec does "
            "not read; describe the tools in a system message and read the answer's text, or use "
            "another model",
            "tools",
        )
    return _chat(bundle, template, messages, arguments)


def message_starts(tokens: Sequence[int], tokenizer: "Tokenizer") -> list[int]:
    """The beginnings of a prompt's second and last messages: other prompts may share the text before them.

    Before the second stand the system's message and tools, before the last the dialogue so far. The first
    control token that occurs again opens every message and the answer.
    """
    places = dict[int, list[int]]()
    for place, token in enumerate(tokens):
        if tokenizer.is_special(token):
            places.setdefault(token, []).append(place)
    starts = next((repeated for repeated in places.values() if len(repeated) > 1), [])
    return sorted({*starts[1:2], *starts[-2:-1]} - {0})


def calls_tools(bundle: Bundle) -> bool:
    """Whether the prompt shows tools to the model, and calls are read from its answer."""
    template = bundle.chat_template
    return template is not None and "tools" in template.arguments and form_of(bundle) is not None


def thoughts_behind(bundle: Bundle, prompt: PromptInput, tokens: Sequence[int]) -> "ThoughtState | None":
    """The state at the beginning of the answer to ``prompt``; None if the model has no thoughts."""
    tags = None if isinstance(prompt, str) else thoughts_tags(bundle)
    if tags is None:
        return None
    from edgespec_models.text.thoughts import state_behind

    return state_behind(tokens, tags, bundle.tokenizer)


def answer_format(bundle: Bundle, request: Request) -> Compilable | None:
    """The form of an answer to a conversation, or None: a required call, its format, or either.

    The format applies to answers without calls.
    """
    tools = request.tools if request.tool_choice != "none" else ()
    if request.response_format is None and (not tools or request.tool_choice == "auto"):
        return None
    form = form_of(bundle)
    if form is None or not (tools or form.text):
        return request.response_format
    from edgespec.asking.tool_calls import Calls, must_call

    if tools and (forced := must_call(tools, request.tool_choice)):
        return Calls(form, forced, bundle.tokenizer, bool(request.parallel_tool_calls))
    several = request.parallel_tool_calls is not False
    return Calls(form, tools, bundle.tokenizer, several, request.response_format)


def begun_form(bundle: Bundle, request: Request) -> "Form | None":
    """The form of calls that the answer may contain without having to; None for other answers."""
    free = request.tools and request.tool_choice == "auto" and request.response_format is None
    return form_of(bundle) if free else None


def form_of(bundle: Bundle) -> "Form | None":
    """The model's form of calls; None if it is unknown."""
    from edgespec.asking.tool_calls import format_of

    template = bundle.chat_template
    return None if template is None else format_of(template.taking(("tools",)).source)


def _chat(
    bundle: Bundle, template: "ChatTemplate", messages: Messages, arguments: Mapping[str, Any]
) -> list[int]:
    if "tool_calls" not in template.taking(arguments).source:
        from edgespec.asking.tool_calls import with_calls_as_text

        messages = with_calls_as_text(template.taking(("tools",)).source, messages)
    tokens = template.encode(messages, bundle.tokenizer, arguments)
    return begun(bundle, with_markers(bundle, tokens, messages))


def begun(bundle: Bundle, ids: list[int]) -> list[int]:
    """``ids``, behind BOS if the model's texts begin with it."""
    special = bundle.manifest.special_tokens
    if not special.add_bos or special.bos is None or ids[:1] == [special.bos]:
        return ids
    return [special.bos, *ids]


def thoughts_tags(bundle: Bundle) -> "Tags | None":
    """The tags of the model's thoughts; None if it does not think."""
    from edgespec_models.text.thoughts import tags_of

    return None if bundle.chat_template is None else tags_of(bundle.chat_template, bundle.tokenizer)


def _arguments(bundle: Bundle, request: Request) -> Mapping[str, Any]:
    """The arguments of the chat template besides the messages."""
    tags = None if request.thinking is None else thoughts_tags(bundle)
    switched = {} if tags is None or request.thinking is None else tags.variables(request.thinking)
    tools = {"tools": request.tools} if request.tools and request.tool_choice != "none" else {}
    return {**switched, **request.template_args, **tools}


def _check_thinking(bundle: Bundle, request: Request) -> None:
    """Check that the model can think if it shall, and that only one option says so."""
    if request.thinking is None or (tags := thoughts_tags(bundle)) is None:
        if request.thinking:
            raise RequestError(
                f"is {shown(request.thinking)}, and {bundle.manifest.name} does not support thinking; leave "
                "it out",
                "thinking",
            )
        return
    for name, value in tags.variables(request.thinking).items():
        stated = request.template_args.get(name, value)
        if (bool(stated) if name == tags.switch else stated) != value:
            raise RequestError(
                f"has {name}={shown(stated)}, which contradicts the wish to think "
                f"({shown(request.thinking)}); give one of them",
                "template_args",
            )
