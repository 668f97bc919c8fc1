"""Requests' bodies: JSON of bounded size that arrives in bounded time, in OpenAI's words and in edgespec's.

Unknown fields are refused, and so are fields that would change the answer in a way that edgespec lacks. So no
client relies on an effect that is missing. Fields that cannot change an answer are accepted and logged:
fields of the type :data:`typing.Any`, fields whose names say so, empty ones, and values that change nothing.
docs/server.md and docs/options.md list them.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, cast

from starlette.requests import Request

from edgespec.asking.call_values import listed, table
from edgespec.asking.request import RequestOptions
from edgespec.decoding.grammar import AnyJson, JsonSchema, ResponseFormat
from edgespec.serve.options import ServeOptions
from edgespec.serve.problems import Problem
from edgespec_models.errors import RequestError
from edgespec_models.schema import length, lone_surrogate, no_number, read, shown, within

T = TypeVar("T")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_THINKING = ("thinking_budget", "thinking_budget_tokens", "reasoning_effort", "enable_thinking")
MOST_TOKENS = 2**31 - 1
"""The most tokens that a request may ask for."""
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")  # halves of characters, perhaps of whole ones
_TOGETHER = 8  # requests of the greatest size whose bodies may arrive at once
_MOST_TEXTS = 1 << 15  # of a request
_LARGE = 64 << 10  # bytes of a body; smaller ones are read at once, whatever waits for threads
_ASIDE = re.compile(
    r"user|store|betas?|priority|service_tier|inference_geo|id_slot|stream_options"
    r"|(.*_)?metadata|(safety|client|request|session|trace|user)_id(entifier)?"
    r"|(.*_)?cache_(control|key|options|prompt|retention|salt)|max_tool_calls|web_search_options"
    r"|keep_alive|num_(batch|ctx|gpu|keep|thread)|main_gpu|numa|use_(mlock|mmap)|low_vram|f16_kv"
)
"""Names of fields about the user, billing, storage, tools that run elsewhere, or a server's memory and
threads."""
_IDLE: Mapping[str, object] = {
    **dict.fromkeys(("min_tokens", "mirostat", "top_a", "dry_multiplier", "xtc_probability", "n_probs"), 0),
    **dict.fromkeys(("best_of", "tfs_z", "typical_p", "length_penalty"), 1),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "use_beam_search"), False),
    **dict.fromkeys(("background", "continue_final_message", "timings_per_token"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "penalize_newline"), True),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), True),
    "reasoning_format": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
    "verbosity": "medium",
}
"""Fields that some bodies lack, with the value that changes nothing. Other values are refused."""
UNUSED = logging.getLogger("edgespec.serve.unused")
"""Receives the names of unused fields of each request; :class:`Once` leaves out repetitions."""
_OF_PAGES = frozenset({"origin", "sec-fetch-site"})  # headers that browsers send with a page's body
_OF_PROGRAMS = ("", "application/x-www-form-urlencoded")  # some send JSON so, as curl -d does
_MOST_MESSAGES = 1000


class Once(logging.Filter):
    """Lets a message through once, and no more than a thousand different ones."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this message is new and within the limit."""
        before, message = len(self._seen), record.getMessage()
        if before < _MOST_MESSAGES:
            self._seen.add(message)
        return len(self._seen) > before


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of sampling and drafting; None stands for the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, within(-(2**63), 2**64 - 1)] | None = None
    # not OpenAI's, but other servers'
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # the same
    prediction: str | Mapping[str, Any] | None = None  # OpenAI's form, or the text alone
    # edgespec's own
    speculate: bool | None = None
    prompt_cache: bool | None = None
    image_tokens: int | None = None

    def of(self, kind: Any) -> dict[str, Any]:
        """The fields of ``kind``, a base class of this body, for a body of another kind."""
        return {body_field.name: getattr(self, body_field.name) for body_field in fields(kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body(Sampling):
    """The fields that most requests for answers share."""

    model: str
    stream: bool = False
    metadata: Any = None  # which responses repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common(Body):
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, within(1, MOST_TOKENS)] | None = None
    logit_bias: Mapping[str, float] | None = None
    stop: str | Sequence[str] | None = None
    n: Annotated[int, within(1, 16)] = 1
    return_progress: bool = False  # llama.cpp's

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("is for streams; leave it out, or set stream to true", "stream_options")

    def options(self) -> RequestOptions:
        """The options of the request to the model, without the prompt."""
        usual = {body_field.name: body_field.default for body_field in fields(self)}
        stated = {name: value for name, value in self.of(self).items() if value != usual[name]}
        stated.pop("max_tokens", None)
        stated |= self._in_other_words()
        known = RequestOptions.__annotations__.keys() & stated.keys()
        return cast(RequestOptions, {name: stated[name] for name in known if stated[name] is not None})

    def names(self) -> dict[str, str]:
        """The client's names of options that the model calls otherwise."""
        is_short = self.repetition_penalty is None and self.repeat_penalty is not None
        return {"repetition_penalty": "repeat_penalty"} if is_short else {}

    def _in_other_words(self) -> dict[str, Any]:
        """Options that have another name or form here."""
        biases = None if self.logit_bias is None else _by_token(self.logit_bias)
        seed = None if self.seed in (None, -1) else self.seed  # front ends say -1 for none
        repeated = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        return {
            "max_new_tokens": self.max_tokens,
            "logit_bias": biases,
            "seed": seed,
            "repetition_penalty": repeated,
            "prediction": _predicted(self.prediction),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(_Common):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[Sequence[Mapping[str, Any]], length(1)]
    max_completion_tokens: Annotated[int, within(1, MOST_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, within(0, 20)] = 0
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Sequence[Mapping[str, Any]] | None = None  # the older form of tools
    function_call: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: Effort | bool | None = None  # True: as the template has it
    # other servers', too: whether to think, and tokens of thoughts
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, within(0)] | None = None
    thinking_budget_tokens: Annotated[int, within(0)] | None = None
    # one value only: the others would change the answer
    modalities: Sequence[Literal["text"]] | None = None

    def _in_other_words(self) -> dict[str, Any]:
        old = [{"type": "function", "function": function} for function in self.functions or ()]
        choice = self.tool_choice or self.function_call
        if isinstance(choice, Mapping) and "name" in choice:  # functions, and Responses
            choice = {"type": "function", "function": choice}
        tools, choice = _chosen(without_foreign(self.tools or old), choice)
        return {
            **_Common._in_other_words(self),
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": False if self.functions else self.parallel_tool_calls,
            "template_args": self.chat_template_kwargs,
            "thinking": self._thinking(),
            "response_format": None
            if self.response_format is None
            else response_format(self.response_format),
        }

    def names(self) -> dict[str, str]:
        name = next((name for name in _THINKING if getattr(self, name) is not None), "reasoning_effort")
        old = {"tools": "functions", "tool_choice": "function_call"} if self.functions else {}
        return _Common.names(self) | {"thinking": name, "template_args": "chat_template_kwargs"} | old

    def _thinking(self) -> bool | int | str | None:
        """Whether or how hard the model thinks; a number of tokens takes precedence over an effort."""
        effort = False if self.reasoning_effort == "none" else self.reasoning_effort
        wishes = (self.thinking_budget, self.thinking_budget_tokens, effort, self.enable_thinking)
        return next((wish for wish in wishes if wish is not None), None)

    @property
    def may_think(self) -> bool:
        """Whether a model without thoughts may answer: an effort says how hard to think, if at all."""
        return not (self.thinking_budget or self.thinking_budget_tokens or self.enable_thinking)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages without null fields, which clients send back from earlier answers.

        Calls in older forms become calls of tools. They have no identifier, so their results get the last.
        """
        messages, id_ = list[dict[str, Any]](), ""
        for at, original in enumerate(self.messages):
            message = {key: value for key, value in original.items() if value is not None}
            for n, part in enumerate(listed(message.get("content"))):
                if table(part).get("type") == "image":  # in an app it may have the path of a file
                    raise RequestError(
                        "is 'image'; allowed: 'text', 'image_url'", f"messages[{at}].content[{n}].type"
                    )
            if isinstance(role := message.get("role"), str):  # some clients capitalize it
                role = message["role"] = role.lower()
            if isinstance(call := message.pop("function_call", None), Mapping):
                id_ = f"{at:09}"  # Mistral's templates want nine letters and digits
                message["tool_calls"] = [{"id": id_, "type": "function", "function": call}]
            elif role == "function":
                message |= {"role": "tool", "tool_call_id": id_}
            elif isinstance(calls := message.get("tool_calls"), list | tuple):
                message["tool_calls"] = [*map(_as_function, calls)]
            if role == "assistant" and not message.get("tool_calls"):
                message.setdefault("content", "")
            messages.append(message)
        return messages


def _predicted(value: str | Mapping[str, Any] | None) -> str | None:
    """The text of a ``prediction``: a text, ``{"type": "content", "content": ...}``, or parts in it."""
    content = value.get("content") if isinstance(value, Mapping) else value or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    if isinstance(parts, list | tuple):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts)) or None
    raise RequestError(
        f"is {shown(value)}; allowed: a text, or "
        '{"type": "content", "content": TEXT or a list of {"type": "text", "text": TEXT}}',
        "prediction",
    )


def texts_in(field: str, value: str | Sequence[Any]) -> Sequence[str | Sequence[int]]:
    """Texts, one or several; numbers are the tokens of one. RequestError for tokens beside texts."""
    if len({isinstance(item, int) for item in value}) > 1:
        raise RequestError("mixes token ids and texts; allowed: texts, or the token ids of a text", field)
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(_Common):
    """Body of ``POST /v1/completions``."""

    prompt: str | Annotated[Sequence[int | str | Sequence[int]], length(1)]
    special: bool = False  # edgespec's own
    suffix: str | None = None
    max_tokens: Annotated[int, within(0, MOST_TOKENS)] | None = None
    logprobs: Annotated[int, within(0, 5)] | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        if len(self.prompts()) > 64:
            raise RequestError(f"has {len(self.prompts())} texts; allowed: at most 64", "prompt")
        if self.suffix and self.echo and self.logprobs is not None:
            raise RequestError(
                "with logprobs scores a prompt, which a fill has not; leave out suffix", "echo"
            )

    def _in_other_words(self) -> dict[str, Any]:
        wanted = None if self.logprobs is None else True
        logprobs = {"logprobs": wanted, "top_logprobs": self.logprobs}
        return _Common._in_other_words(self) | logprobs | {"prompt_logprobs": wanted if self.echo else None}

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts, one or several; numbers are the tokens of one."""
        return texts_in("prompt", self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBody:
    """Body of ``POST /v1/embeddings``."""

    model: str
    input: str | Annotated[Sequence[int | str | Sequence[int]], length(1, 2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    instruction: str | None = None  # edgespec's own

    def __post_init__(self) -> None:
        self.texts()

    def texts(self) -> Sequence[str | Sequence[int]]:
        """The texts, one or several; numbers are the tokens of one."""
        return texts_in("input", self.input)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankDocument:
    """An item of ``documents`` that is no text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody:
    """Body of ``POST /v1/rerank``, as Jina and Cohere have it."""

    model: str
    query: Annotated[str, length(1)]
    documents: Annotated[Sequence[str | RerankDocument], length(1, 2048)]
    top_n: Annotated[int, within(1)] | None = None
    return_documents: bool = False
    instruction: str | None = None  # edgespec's own

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillFile:
    """An item of ``input_extra``."""

    text: str
    filename: str = "file"
    time: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillBody(Body):
    """Body of llama.cpp's ``POST /infill``, as its plug-ins for editors send it."""

    model: str = ""
    input_prefix: str
    input_suffix: str
    prompt: str = ""  # of the prefix, what stands on the cursor's line
    input_extra: Sequence[InfillFile] = ()
    n_predict: Annotated[int, within(-1, MOST_TOKENS)] = -1
    stop: str | Sequence[str] = ()
    response_fields: Sequence[str] = ()
    max_lines: Annotated[int, within(1)] | None = None  # edgespec's own
    # change nothing here
    n_indent: Any = None
    samplers: Any = None
    t_max_predict_ms: Any = None
    t_max_prompt_ms: Any = None

    def completion(self, model: str) -> "CompletionBody":
        """The options of a completion."""
        shared = self.of(Body) | {"model": self.model or model, "prompt": "", "stop": self.stop}
        return CompletionBody(**shared, max_tokens=None if self.n_predict < 0 else self.n_predict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetBody:
    """Body of ``POST /edgespec/history/forget``, with exactly one of its fields."""

    text: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        if self.everything == (self.text is not None):
            raise RequestError('give either {"text": TEXT} or {"everything": true}')


async def read_body(cls: type[T], request: Request, options: ServeOptions) -> T:
    """The body of a request, of the form ``cls``. A large one takes seconds, so a thread parses it.

    Raises:
        Problem: it is too long (413), too slow (408), not said to be JSON (415), or not a JSON object (400).
        RequestError: a field is wrong; the message is about the first one.
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_page = any(name in request.headers for name in _OF_PAGES)
    if kind != "application/json" and (is_page or kind not in _OF_PROGRAMS):  # any page may send others
        raise Problem(415, f"the Content-Type is {kind!r:.80}; send application/json")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise Problem(415, f"the body is compressed ({coding!r:.80}); send it as it is")
    arrival, arriving = asyncio.timeout(options.body_timeout_s), request.app.state.arriving
    try:
        async with arrival:
            data = await _read(request, options.max_request_bytes, arrival, arriving)
        if len(data) < _LARGE:
            return parse(cls, _json(data))
        return await asyncio.to_thread(lambda: parse(cls, _json(data)))
    except TimeoutError:
        raise Problem(
            408,
            f"the request did not arrive within {options.body_timeout_s:g} s, or had to make room for newer "
            "ones",
            headers={"Connection": "close"},  # the rest may never come
        ) from None
    finally:
        arriving.pop(arrival, None)


def _json(data: bytearray) -> dict[str, Any]:
    texts = (data.count(b'"') - data.count(b'\\"')) // 2
    if texts > _MOST_TEXTS:  # each takes time, above all in a chat template
        raise Problem(
            413,
            f"the request has {texts:,} texts, names of fields included; allowed: {_MOST_TEXTS:,}. Send "
            "fewer messages or tools",
            "request_too_large",
        )
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=no_number)
        if _HALVES.search(data):
            _check_texts(value, "")
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(value, dict):
        raise Problem(400, "the request is not a JSON object", "invalid_json")
    return value


def parse(cls: type[T], body: Mapping[str, Any], where: str = "the request") -> T:
    """A request of the form ``cls``; null counts as missing. RequestError for the first wrong field."""
    kind: Any = cls
    values = {name: value for name, value in body.items() if value is not None}
    known = {known_field.name: known_field.type for known_field in fields(kind)}
    for name in [*values]:
        if known.get(name) is Any or (name not in known and _is_idle(name, values[name])):
            UNUSED.info("requests have the field %s, which changes no answer here", shown(name))
            if name not in known:
                del values[name]
    return read(cls, values, where, RequestError, "docs/options.md and docs/server.md list the fields")


def _is_idle(name: str, value: object) -> bool:
    """Whether an unknown field changes nothing. RequestError for another value of a field of ``_IDLE``."""
    if _IDLE.get(name, value) != value:
        raise RequestError(f"is {shown(value)}; allowed: {_IDLE[name]!r}, with no effect", name)
    return name in _IDLE or value in ("", [], {}) or _ASIDE.fullmatch(name) is not None


async def _read(
    request: Request, limit: int, arrival: asyncio.Timeout, arriving: dict[asyncio.Timeout, int]
) -> bytearray:
    """The bytes of a body.

    ``arriving`` has the bytes of all bodies that are not parsed yet. Beyond their bound the oldest ones end.
    """
    length = request.headers.get("content-length", "0")
    data = bytearray()
    if length.isdecimal() and int(length[:20]) <= limit:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                break
            arriving[arrival] = len(data)
            for oldest in [*arriving] if sum(arriving.values()) > _TOGETHER * limit else ():
                with suppress(RuntimeError):  # it is whole, or ends already
                    oldest.reschedule(0)
                    arriving[oldest] = 0
                    break
        else:
            return data
    raise Problem(
        413,
        f"the request is longer than {limit:,} bytes; send less, or start the server with more "
        "--max-request-bytes",
        "request_too_large",
    )


def _check_texts(value: object, place: str) -> None:
    """Raise RequestError for the first text that no tokenizer reads."""
    if isinstance(value, str) and (wrong := lone_surrogate(value)):
        raise RequestError(wrong.lstrip(), place.lstrip("."))
    parts = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, part in parts:
        within = f"{place}.{key}" if isinstance(value, dict) else f"{place}[{key}]"
        _check_texts(key, within)
        _check_texts(part, within)


def without_foreign(tools: Sequence[Mapping[str, Any]], kind: str = "function") -> list[Mapping[str, Any]]:
    """The tools of the type ``kind``. Others run elsewhere or take no JSON; models do not see them."""
    kinds = [tool.get("type") or kind for tool in tools]
    for other in {shown(tool_kind) for tool_kind in kinds if tool_kind != kind}:
        UNUSED.info("requests have tools of the type %s, which no model here is shown", other)
    return [tool for tool, tool_kind in zip(tools, kinds, strict=True) if tool_kind == kind]


def _chosen(
    tools: list[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> tuple[list[Mapping[str, Any]], str | Mapping[str, Any] | None]:
    """The tools that a choice of the type ``allowed_tools`` leaves, and the choice among them.

    Chats have its fields beneath the type's name, Responses beside it.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    wanted = table(choice.get("allowed_tools", choice))
    mode, named = wanted.get("mode"), [table(tool) for tool in listed(wanted.get("tools"))]
    names = [table(tool.get("function", tool)).get("name") for tool in named]
    left = [tool for tool in tools if table(tool.get("function")).get("name") in names]
    if mode not in ("auto", "required") or not left:
        raise RequestError(
            f"is {shown(choice)}; allowed: the mode 'auto' or 'required', and names of tools", "tool_choice"
        )
    return left, mode


def _as_function(call: object) -> object:
    """A call of a custom tool, which takes a text, as the call of a function."""
    if not (custom := table(table(call).get("custom"))):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return {"id": table(call).get("id"), "type": "function", "function": function}


def response_format(wanted: Mapping[str, Any], name: str = "response_format") -> ResponseFormat | None:
    """The form of an answer, from the field ``name``; None is a text. RequestError for unknown forms."""
    wanted = {key: value for key, value in wanted.items() if value is not None}
    kind, within = wanted.get("type"), wanted.get("json_schema")
    known = {"type"} if kind == "text" else {"type", "json_schema", "schema", "strict", "name", "description"}
    parts = wanted if within is None else within  # Responses and Messages have its fields beside the type
    schema = parts.get("schema") if isinstance(parts, Mapping) else None
    unknown = [*(wanted.keys() - known), *(parts.keys() - known if isinstance(parts, Mapping) else ())]
    unknown += ["schema"] * (within is not None and "schema" in wanted)  # one of two schemas would be dropped
    if not unknown and kind == "text":
        return None
    if not unknown and kind == "json_object" and schema is None and within is None:
        return AnyJson()
    if not unknown and kind in ("json_object", "json_schema") and isinstance(schema, Mapping):
        return JsonSchema(schema, strict=parts.get("strict") is True)
    problem = f"has the unknown field {min(map(str, unknown))!r:.80}" if unknown else f"is {wanted!r:.200}"
    raise RequestError(
        f"{problem}; allowed: {{'type': 'text'}}, {{'type': 'json_object'}}, "
        "{'type': 'json_schema', 'json_schema': {'schema': SCHEMA}}, or the schema beside the type",
        name,
    )


def _by_token(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise RequestError(f"is {biases!r:.200}; its keys are ids of tokens", "logit_bias") from None
