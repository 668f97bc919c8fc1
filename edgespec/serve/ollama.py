"""``/api``, Ollama's API: its requests as chats, and its lines of JSON in place of events."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.answering.results import Generation, Record, TokenRecord, ToolCall
from edgespec.asking.fill import fills
from edgespec.asking.request import Hole, calls_tools, thoughts_tags
from edgespec.decoding.schemas import rewritten
from edgespec.engine import Model
from edgespec.loading.first_use import Found
from edgespec.models import Models
from edgespec.serve.blocks import add_call, field_of, image_part, text_of
from edgespec.serve.bodies import ChatBody, EmbeddingBody, Sampling, parse
from edgespec.serve.completions import Completions, Job
from edgespec.serve.problems import Problem
from edgespec.serve.replies import Json, Reply, with_rows
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.catalog import CatalogueEntry
from edgespec_models.errors import RequestError
from edgespec_models.schema import Limit, length, shown, within

VERSION = "0.33.0"
"""The version of Ollama whose API this follows. Clients check it."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAMES = {"response_format": "format", "thinking": "think"}
_NO_TIME = re.compile(r"0[0.a-z]*")
_FOREVER_S = 200 * 365 * 86400.0
MANAGING = (*(f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete")), "/api/blobs/{digest}")
"""Paths that change models, which this server does not do."""


def _empty(reason: str) -> Limit:
    return Limit(lambda value: not value, f"that is empty: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Sampling):
    """``options``. Those about memory and threads change no answer."""

    num_predict: Annotated[int, within(-2, 2**31 - 1)] = -1
    stop: str | Sequence[str] | None = None
    repeat_last_n: int | None = None
    # change nothing here
    draft_num_predict: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None

    def __post_init__(self) -> None:
        penalties = (
            (self.repetition_penalty or self.repeat_penalty or 1) - 1,
            self.presence_penalty,
            self.frequency_penalty,
        )
        if self.repeat_last_n not in (None, -1) and any(penalties):
            raise RequestError(
                f"is {self.repeat_last_n} beside a penalty; allowed: -1, all tokens before", "repeat_last_n"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The common fields of requests for answers."""

    model: str
    stream: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    format: Literal["", "json"] | Mapping[str, Any] = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, within(0, 20)] = 0
    # change nothing here: what does not fit the context is refused
    truncate: Any = None
    shift: Any = None

    def about(self, messages: Sequence[Json], tools: Sequence[Mapping[str, Any]] = ()) -> ChatBody:
        """The same request as a chat about ``messages``."""
        options = parse(Options, self.options, "options")
        form: Json | None = {"type": "json_object"} if self.format == "json" else None
        if isinstance(self.format, Mapping):
            form = {"type": "json_schema", "schema": _closed(self.format)}
        return ChatBody(
            **options.of(Sampling),
            model=self.model,
            stream=self.stream,
            messages=messages,
            stop=options.stop,
            max_tokens=options.num_predict if options.num_predict > 0 else None,
            tools=tools or None,
            response_format=form,
            reasoning_effort=self.think,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt unloads the model."""
        return _NO_TIME.fullmatch(str(self.keep_alive)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatBody(_Body):
    """Body of ``POST /api/chat``."""

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    def chat(self) -> ChatBody:
        """The same request as a chat."""
        return self.about(_messages(self.messages), self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(_Body):
    """Body of ``POST /api/generate``: a question, a raw prompt, or a hole in a text."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    # nothing else: it would change the answer
    template: Annotated[str, _empty("the model's own template is used; for none set raw")] = ""
    context: Annotated[Sequence[int], _empty("/api/chat takes a conversation")] = ()
    images: Sequence[str] = ()

    def __post_init__(self) -> None:
        if sum(map(bool, (self.raw, self.suffix, self.system))) > 1:
            raise RequestError("raw, suffix and system exclude each other; leave out all but one")
        if self.images and (self.raw or self.suffix):
            raise RequestError("are for questions; leave them out, or raw and suffix", "images")

    def job(self, reply: Reply) -> Job:
        """The request's job. Raw prompts and fills use a chat's options only."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt, self.images, "images")
        chat = self.about([*system, {"role": "user", "content": content}])
        if not (self.raw or self.suffix):
            return Job(chat, [chat.conversation()], reply, _NAMES)
        chat = chat if self.think else replace(chat, reasoning_effort=None)  # a text has none to turn off
        prompt = Hole(self.prompt, self.suffix) if self.suffix else self.prompt
        return Job(chat, [prompt], reply, _NAMES, more={"special": True} if self.raw else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBody:
    """Body of ``POST /api/embed``, and with ``prompt`` of the older ``POST /api/embeddings``."""

    model: str
    input: str | Annotated[Sequence[str], length(0, 2048)] = ()
    prompt: str = ""
    dimensions: int | None = None
    # change nothing here: what does not fit the context is refused
    truncate: Any = None
    options: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowBody:
    """Body of ``POST /api/show``; ``name`` is what older clients call the model."""

    model: str = ""
    name: str = ""
    verbose: Any = None
    system: Any = None
    template: Any = None
    options: Any = None


def _closed(schema: Mapping[str, Any]) -> Any:
    """The schema, without further properties if it lists some and does not mention others, like Ollama."""

    def closed(part: Json, place: str) -> Json:
        is_whole = "properties" in part and "/allOf/" not in place
        return {"additionalProperties": False} | part if is_whole else part

    try:
        return rewritten(schema, "#", closed)
    except RecursionError:
        raise RequestError("has too many levels; give a flatter schema", "format") from None


def _messages(conversation: Sequence[Mapping[str, Any]]) -> list[Json]:
    """A chat's messages. Results without an identifier belong to the last calls in order."""
    messages, calls = list[Json](), iter(list[Json]())
    for at, message in enumerate(conversation):
        where = f"messages[{at}]"
        role = field_of(message, "role", where, _ROLES)
        text = text_of(message.get("content") or "", f"{where}.content", ("text",))
        content = _with_images(text, message.get("images") or (), f"{where}.images")
        thoughts = message.get("thinking") or None
        messages.append({"role": role, "content": content, "reasoning_content": thoughts})
        if role == "tool":
            id_ = message.get("tool_call_id") or next(calls, {}).get("id")
            messages[-1] |= {"tool_call_id": id_, "name": message.get("tool_name")}
        tool_calls = message.get("tool_calls") or ()
        if not isinstance(tool_calls, list | tuple):
            raise RequestError(f"is {shown(tool_calls)}; allowed: a list of calls", f"{where}.tool_calls")
        for n, call in enumerate(tool_calls):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise RequestError(
                    f"is {shown(call)}; allowed: one with a 'function'", f"{where}.tool_calls[{n}]"
                )
            id_ = call.get("id") or f"{at:06}{n:03}"  # Mistral's templates want nine letters and digits
            add_call(messages, id_, function.get("name"), function.get("arguments"))
            calls = iter(messages[-1]["tool_calls"])
    return messages


def _with_images(text: str, images: Any, where: str) -> str | list[Json]:
    """The content of a message: its pictures stand before its text."""
    if not isinstance(images, list | tuple):
        raise RequestError(f"is {shown(images)}; allowed: a list of pictures in base64", where)
    parts = [image_part(image, f"{where}[{n}]") for n, image in enumerate(images)]
    return [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text


@dataclass(slots=True)
class OllamaReply(Reply):
    """Lines of ``/api/chat``, or of ``/api/generate``, which have a text (``is_text``) instead of a message.

    ``began`` and ``loaded`` are times of the monotonic clock, in seconds.
    """

    media_type: ClassVar[str] = "application/x-ndjson"

    began: float
    is_text: bool = False
    logprobs: bool = False
    loaded: float = 0.0

    def use(self, model: Model) -> None:
        Reply.use(self, model)
        self.loaded = monotonic()

    def whole(self, answers: Sequence[Generation]) -> Json:
        answer = answers[0]
        tokens = answer.records[len(answer.thoughts) :]
        piece = self._piece(answer.content, answer.reasoning, answer.tool_calls, tokens)
        return piece | self._ended(answer)

    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        """A piece of the thoughts or of the text. Calls come whole at the end."""
        tokens = record.tokens[len(record.thoughts) :]
        return [self._piece(record.content, record.reasoning, tokens=tokens)]

    def end(self, answer: Generation) -> list[Json]:
        """The calls, why it ended, and what it cost."""
        calls = [self._piece(calls=answer.tool_calls)] if answer.tool_calls else []
        return [*calls, self._piece() | self._ended(answer)]

    def line(self, event: Mapping[str, Any]) -> str:
        """A line in ASCII, because some clients take U+2028 for the end of a line."""
        return f"{json.dumps(event)}\n"

    def comment(self, text: str) -> str:
        """An empty piece: lines of JSON have no comments."""
        return self.line(self._piece())

    def nothing(self, reason: str) -> Json:
        """The whole answer to a request without a prompt."""
        return self._piece() | {"done": True, "done_reason": reason}

    def _piece(
        self,
        content: str = "",
        thinking: str = "",
        calls: Sequence[ToolCall] = (),
        tokens: Sequence[TokenRecord] = (),
    ) -> Json:
        parts: Json = {"thinking": thinking} if thinking else {}
        if calls:
            parts["tool_calls"] = [_call_json(at, call) for at, call in enumerate(calls)]
        message = {"message": {"role": "assistant", "content": content, **parts}}
        answer = {"response": content, **parts} if self.is_text else message
        scores = {"logprobs": self._scores(tokens)} if self.logprobs and tokens else {}
        return {"model": self.model, "created_at": _at(datetime.now(UTC)), **answer, "done": False, **scores}

    def _ended(self, answer: Generation) -> Json:
        stats, total = answer.stats, monotonic() - self.began
        load = self.loaded - self.began
        return {
            "done": True,
            "done_reason": "stop" if answer.finish_reason in ("stop", "tool_calls") else "length",
            **_durations(total=total, load=load, prompt_eval=stats.ttft_s, eval=stats.decode_s),
            "prompt_eval_count": stats.prompt_tokens,
            "eval_count": len(answer.tokens),
            "edgespec": self._extension(answer),
        }


def _call_json(at: int, call: ToolCall) -> Json:
    return {"id": call.id, "function": {"index": at, "name": call.name, "arguments": call.arguments}}


def _durations(**seconds: float) -> dict[str, int]:
    """Durations in nanoseconds."""
    return {f"{name}_duration": round(1e9 * duration) for name, duration in seconds.items()}


def _at(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


class Ollama:
    """The paths below ``/api``; ``completions`` asks the models."""

    def __init__(self, completions: Completions, models: Models) -> None:
        self._completions, self._models = completions, models
        self._since = _at(datetime.now(UTC))
        self._info = dict[str, Json]()  # facts of each model

    async def chat(self, request: Request) -> Response:
        """``POST /api/chat``."""
        began = monotonic()
        body = await self._completions.read(OllamaChatBody, request)
        reply = OllamaReply(body.model, began, logprobs=body.logprobs)
        if not body.messages:
            return await self._nothing(request, body, reply)
        chat = body.chat()
        return await self._completions.respond(request, Job(chat, [chat.conversation()], reply, _NAMES))

    async def generate(self, request: Request) -> Response:
        """``POST /api/generate``."""
        began = monotonic()
        body = await self._completions.read(GenerateBody, request)
        reply = OllamaReply(body.model, began, is_text=True, logprobs=body.logprobs)
        if not (body.prompt or body.suffix or body.images):
            return await self._nothing(request, body, reply)
        return await self._completions.respond(request, body.job(reply))

    async def _nothing(self, request: Request, body: _Body, reply: OllamaReply) -> Response:
        """Load the model, or unload it as soon as it is unused."""
        if body.unloads:
            self._models.unload(self._completions.known_name(body.model))
        else:
            await self._completions.model(request, body.model)
        return JSONResponse(reply.nothing("unload" if body.unloads else "load"))

    async def embed(self, request: Request) -> Response:
        """``POST /api/embed``, and ``/api/embeddings``, which older clients ask for the vector of a text."""
        began = monotonic()
        body = await self._completions.read(EmbedBody, request)
        texts = body.input or body.prompt
        used = await self._completions.model(request, body.model)
        rows, tokens, loaded = iter(list[list[float]]()), 0, monotonic()
        if texts:
            embedding = EmbeddingBody(model=body.model, input=texts, dimensions=body.dimensions)
            embeddings = await self._completions.vectors(request, embedding, *used)
            rows, tokens = (row.tolist() for row in embeddings.vectors), sum(embeddings.tokens)
        if request.url.path == "/api/embeddings":
            return JSONResponse({"embedding": next(rows, [])})
        cost = _durations(total=monotonic() - began, load=loaded - began) | {"prompt_eval_count": tokens}
        write = partial(with_rows, {"model": body.model, **cost}, "embeddings", rows)
        return Response(await asyncio.to_thread(write), media_type="application/json")

    async def tags(self, _: Request) -> Response:
        """``GET /api/tags``."""
        listed = await asyncio.to_thread(lambda: [*map(self._listed, self._models.names)])
        return JSONResponse({"models": [model | {"modified_at": self._since} for model in listed]})

    async def ps(self, _: Request) -> Response:
        """``GET /api/ps``."""
        loaded = self._models.loaded.items()
        return JSONResponse({"models": [self._running(name, model) for name, model in loaded]})

    async def show(self, request: Request) -> Response:
        """``POST /api/show``. Loads a model without a bundle, because only then its abilities are known."""
        body = await self._completions.read(ShowBody, request)
        name = self._completions.known_name(body.model or body.name)
        info = await asyncio.to_thread(self._info_of, name)
        if "template" not in info:
            await self._completions.model(request, name)
            info = self._info_of(name)
        fields = {key: info[key] for key in ("template", "details", "model_info", "capabilities")}
        return JSONResponse({"parameters": "", **fields, "modified_at": self._since})

    async def version(self, _: Request) -> Response:
        """``GET /api/version``."""
        return JSONResponse({"version": VERSION})

    async def manage(self, request: Request) -> Response:
        """Refuse requests that change models, with a Problem of status 501."""
        instead = "'edgespec serve NAME...' names models, of files too; 'edgespec pull NAME' fetches one"
        raise Problem(501, f"{request.url.path} changes no models here; {instead}", "not_implemented")

    def _info_of(self, name: str) -> Json:
        """Facts of a model; before its export only what its file or the catalogue says."""
        if "template" not in self._info.get(name, {}):
            self._info[name] = _info(name, self._models.found(name))
        return self._info[name]

    def _listed(self, name: str) -> Json:
        tagged, info = f"{name}:latest", self._info_of(name)
        facts = {key: info[key] for key in ("size", "digest", "details", "capabilities")}
        return {"name": tagged, "model": tagged, **facts}

    def _running(self, name: str, model: Model) -> Json:
        listed, keep = self._listed(name), self._models.kept_s(name)
        until = datetime.now(UTC) + timedelta(seconds=min(_FOREVER_S, _FOREVER_S if keep is None else keep))
        size = self._models.memory_bytes.get(name, listed["size"])
        return listed | {
            "size": size,
            "size_vram": size if model.placement.device.kind.hardware == "GPU" else 0,
            "context_length": model.target.config.context_length,
            "expires_at": _at(until),
        }


def _info(name: str, bundle: Found | None) -> Json:
    """Facts of a model for Ollama's clients."""
    if not isinstance(bundle, Bundle):
        entry = bundle if isinstance(bundle, CatalogueEntry) else None
        files = [bundle, *bundle.glob("*")] if isinstance(bundle, Path) else []
        size = sum(file.stat().st_size for file in files if file.is_file())
        return {
            "size": size if entry is None else entry.size_bytes,
            "digest": _digest(name if entry is None else entry.sha256),
            "details": _details("", 0) if entry is None else _details(entry.architecture, entry.parameters),
            "capabilities": ["completion"],
        }
    manifest, config = bundle.manifest, bundle.config
    weights, formats = manifest.parameters_per_pass, Counter(manifest.formats)
    thinks = thoughts_tags(bundle) is not None
    skills = {"tools": calls_tools(bundle), "thinking": thinks, "insert": fills(bundle)}
    skills["vision"] = bundle.reads_images
    answers = ["completion", *(skill for skill, is_known in skills.items() if is_known)]
    family, template = config.architecture, bundle.chat_template.source if bundle.chat_template else ""
    return {
        "size": manifest.size_bytes,
        "digest": _digest(bundle.digest, template),
        "details": _details(family, weights, *(form for form, _ in formats.most_common(1))),
        "capabilities": ["embedding"] if bundle.embeds else answers,
        "template": template,
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": weights,
            f"{family}.context_length": config.context_length,
        },
    }


def _digest(*parts: str) -> str:
    """The digest of a model, under which clients keep its abilities."""
    return sha256("\n".join(parts).encode()).hexdigest()


def _details(family: str, weights: int, form: str = "") -> Json:
    size = f"{weights / 1e9:.1f}B" if weights >= 1e9 else f"{weights / 1e6:.0f}M"
    return {
        "parent_model": "",
        "format": "onnx",
        "family": family,
        "families": [family],
        "parameter_size": size if weights else "",
        "quantization_level": form,
    }
