"""Options that several commands share, and the models and requests that they describe."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import typer

from edgespec.cli.console import note
from edgespec_models.progress import ProgressCallback
from edgespec_models.schema import described

if TYPE_CHECKING:
    from edgespec.asking.request import Effort, RequestOptions
    from edgespec.engine import Model
    from edgespec.measuring.prompts import Prompt

_MINUTE_S = 90.0
_FARTHEST = 2**31 - 1  # bounds beyond it say nothing to a reader of the help
T = TypeVar("T")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A bundle's directory, one made for onnxruntime-genai or by Optimum, a GGUF file, a Hugging "
        "Face directory, a name that 'edgespec models' lists, or hf:OWNER/REPO on the hub.",
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        metavar="DRAFTER",
        help="The drafter: a model named like TARGET, 'auto' (the one recommended for the target), "
        "'ngram' (phrases of the text alone), or 'none'.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens that an answer may have.")]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="A picture that the question is about: PNG, JPEG, WebP or GIF. May be repeated.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
PromptCache = Annotated[
    bool,
    typer.Option(
        "--prompt-cache/--no-prompt-cache",
        help="Whether prompts that were read are kept on disk, for your user alone, so that they need not be "
        "read again; 'edgespec cache' shows and clears them.",
    ),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help="A file of prompts: each line is a JSON object with id (or question_id, as Spec-Bench has it), "
        "category and turns. Default: the built-in prompts.",
    ),
]
Select = Annotated[
    Path | None,
    typer.Option(
        "--select", metavar="FILE", help="A file with the ids of the prompts to take, one on each line."
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="The most prompts to take, spread over the categories.")
]

_DEVICES = "auto, cpu, npu, or a name that 'edgespec devices' lists"

Group = Mapping[str, tuple[Any, Any]]
"""Options by name, each with its annotation for typer and its default."""


def of(cls: Any, *names: str, **flags: str) -> Group:
    """Options for fields of a dataclass, with their limits, defaults and words.

    They are called like the fields, or as ``flags`` say. Without docstrings (``python -OO``) they have no
    words.
    """
    hints, words = get_type_hints(cls, include_extras=True), described(cls)
    usual = {field.name: field.default for field in fields(cls)}
    flags = {name: f"--{name.replace('_', '-')}" for name in names} | flags
    return {
        name: _of_field(hints[name], usual[name], words.get(name, ""), flag) for name, flag in flags.items()
    }


def _of_field(hint: Any, default: Any, words: str, flag: str) -> tuple[Any, Any]:
    kind, bounds = _kind(hint)
    words = re.sub(r":\w+:`~?\.?([\w.]+)`", r"\1", words).replace("``", "`")
    if isinstance(default, tuple):
        kind, default, words = kind | None, None, f"{words} May be repeated."
    return Annotated[kind, typer.Option(flag, help=words, **bounds)], default


def _kind(hint: Any) -> tuple[Any, dict[str, Any]]:
    """A field's type as typer knows it, and the bounds of its numbers."""
    origin, (first, *others) = get_origin(hint), get_args(hint) or (hint,)
    if origin is Annotated:
        bounds = {"min": others[0].low, "max": others[0].high}
        return first, {end: at for end, at in bounds.items() if at is not None and abs(at) < _FARTHEST}
    if origin in (Union, UnionType):
        kind, bounds = _kind(first)
        return kind | None, bounds
    return (list[_kind(first)[0]] if origin is tuple else hint), {}  # type: ignore[misc] # made of a value


def filled(cls: type[T], context: typer.Context, **others: Any) -> T:
    """The dataclass of ``others`` and a command's parameters of the same names."""
    kind: Any = cls
    values = {field.name: context.params.get(field.name, field.default) for field in fields(kind)} | others
    lists = {field.name: tuple(values[field.name] or ()) for field in fields(kind) if field.default == ()}
    return cls(**values | lists)


def _option(kind: Any, default: Any, text: str, *names: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=text, **settings)], default


def loading() -> Group:
    """Options of commands that load a target and a drafter; :func:`load_model` reads them."""
    from edgespec.loading.options import LoadOptions

    device = "The device of the drafter: the same names as for --device."
    return {
        "drafter": (Drafter, "auto"),
        **of(LoadOptions, "threads", "kv", "mmproj", adapters="--adapter"),
        "device": _option(str, "auto", f"The device of the target: {_DEVICES}.", metavar="DEVICE"),
        "drafter_device": _option(str, "auto", device, metavar="DEVICE"),
        "history": _option(
            str | None,
            None,
            "A history, by name or file: answers are learned there and drafted from. 'edgespec history' "
            "shows and deletes what was learned. Without the option nothing is learned.",
            metavar="NAME",
        ),
    }


def prompts() -> Group:
    """Options of commands that answer a user."""
    from edgespec.loading.options import LoadOptions

    return {
        "prompt_cache": (PromptCache, True),
        **of(LoadOptions, "chat_template", "keep_prompts", "image_tokens"),
    }


def sampling() -> Group:
    """Options of sampling; :func:`sampling_options` reads them."""
    from edgespec.decoding.sampling import SamplingParams

    return of(SamplingParams, "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def request() -> Group:
    """Options of a request; :func:`request_options` reads them, and ``max_new_tokens``."""
    from edgespec.asking.request import Request
    from edgespec.decoding.sampling import SamplingParams

    return {
        **sampling(),
        **of(SamplingParams, "seed"),
        **of(Request, "stop"),
        "thinking": _option(
            str | None,
            None,
            "Whether the model thinks before it answers, how hard (minimal, low, medium, high, xhigh, max), "
            "or for how many tokens at most; the chat template decides without it.",
            metavar="on|off|EFFORT|TOKENS",
        ),
        "prediction": _option(
            Path | None,
            None,
            "A file whose text the answer probably repeats, such as the one that it edits. Drafts are copied "
            "from it; the answer stays the same.",
            metavar="FILE",
        ),
        "no_speculation": _option(bool, False, "Decode without drafts, for comparison.", "--no-speculation"),
    }


def shared(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of these groups to a command, which finds them in its context."""
    options = {name: option for group in groups for name, option in group.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            command(**{name: values[name] for name in own})

        run.__signature__ = inspect.Signature([*own.values(), *added])  # type: ignore[attr-defined]
        run.__annotations__ |= {parameter.name: parameter.annotation for parameter in added}
        return run

    return decorate


def load_model(context: typer.Context, progress: ProgressCallback, **named: str) -> "Model":
    """Load the models that a command's parameters, or ``named``, name."""
    import edgespec

    return edgespec.load(progress=progress, **load_arguments(context, **named))


def load_arguments(context: typer.Context, **named: str) -> dict[str, Any]:
    """The arguments of :func:`edgespec.load` for a command's parameters. ``none`` is no drafter."""
    from edgespec.loading.options import LoadOptions

    values: dict[str, Any] = context.params | named
    # Commands without the option measure, and the cache would falsify that.
    uncached: dict[str, Any] = {} if values.get("prompt_cache") else {"prompt_cache_bytes": 0}
    places: dict[str, Any] = {
        name: values[name] for name in ("history", "device", "drafter_device") if name in values
    }
    drafter = None if values["drafter"] == "none" else values["drafter"]
    options = filled(LoadOptions, context, **uncached)
    return {"target": values["target"], "drafter": drafter, "options": options, **places}


def prompts_to_run(file: Path | None, limit: int | None, ids: Path | None = None) -> "tuple[Prompt, ...]":
    """The prompts of ``file``, or the built-in ones; those that ``ids`` names, and at most ``limit``."""
    from edgespec.measuring.prompts import builtin_prompts, load_prompts, named, select

    prompts = builtin_prompts() if file is None else load_prompts(file)
    return select(prompts if ids is None else named(prompts, ids), limit)


def note_duration(model: "Model", answers: int, max_new_tokens: int) -> None:
    """Say how long so many answers take at most: as long as plain decoding of their most tokens."""
    seconds = answers * max_new_tokens * model.cost_curve.seconds(1)
    time = f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / 60:.0f} minutes"
    note(f"At most {answers} answers of {max_new_tokens} tokens: at most {time} of decoding.")


def request_options(context: typer.Context) -> "RequestOptions":
    """The options of a request from a command's parameters."""
    values = context.params
    return {
        **sampling_options(context),
        "max_new_tokens": values["max_new_tokens"],
        "seed": values["seed"],
        "stop": tuple(values["stop"] or ()),
        "prediction": _text(values["prediction"]),
        "speculate": not values["no_speculation"],
        "thinking": thinking(values["thinking"]),
    }


def _text(file: Path | None) -> str:
    from edgespec_models.errors import RequestError
    from edgespec_models.schema import read_text

    return "" if file is None else read_text(file, RequestError, "Give a file of text in UTF-8")


def thinking(value: str | None) -> "bool | int | Effort | None":
    """The value of ``--thinking``."""
    if value in (None, "on", "off"):
        return None if value is None else value == "on"
    from edgespec.asking.request import Effort  # and much that other options do without

    efforts = get_args(Effort)
    if value in efforts:
        return cast(Effort, value)
    try:
        return int(value or "")
    except ValueError:
        words = f"on, off, {', '.join(efforts)} and a number of tokens"
        raise typer.BadParameter(f"{value!r} is unknown; allowed: {words}") from None


def sampling_options(context: typer.Context) -> "RequestOptions":
    """The options of sampling that the command line states."""
    stated = (name for name in sampling() if is_stated(context, name))
    return cast("RequestOptions", {name: context.params[name] for name in stated})


def is_stated(context: typer.Context, name: str) -> bool:
    """Whether the command line states this parameter."""
    source = context.get_parameter_source(name)
    return source is None or source.name != "DEFAULT"
