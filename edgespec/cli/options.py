"""Options that several commands share, and the models and requests that they describe."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from edgespec.cli.console import note
from edgespec_models.progress import ProgressCallback

if TYPE_CHECKING:
    from edgespec.asking.request import Effort, RequestOptions
    from edgespec.engine import Model
    from edgespec.measuring.prompts import Prompt

_MINUTE_S = 90.0

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
Threads = Annotated[
    int,
    typer.Option(
        min=0,
        help="Threads of a pass, at most twice the logical cores; 0 takes the physical cores.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens that an answer may have.")]
Temperature = Annotated[
    float, typer.Option(help="0 takes the most likely token; 1 samples from the model's own distribution.")
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
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="A file with a chat template in Jinja, in place of the model's own.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="PATH[=SCALE]",
        help="A LoRA adapter to merge into the target's weights: a directory of PEFT, or a GGUF file. May be "
        "repeated.",
    ),
]
Instructions = Annotated[
    str,
    typer.Option(
        help="The instructions that edgespec's kernels use, such as avx2. Default: the best that the "
        "processor has."
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


def _option(kind: Any, default: Any, text: str, *names: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=text, **settings)], default


LOADING: Group = {
    "drafter": (Drafter, "auto"),
    "threads": (Threads, 0),
    "device": _option(str, "auto", f"The device of the target: {_DEVICES}.", metavar="DEVICE"),
    "drafter_device": _option(
        str, "auto", "The device of the drafter: the same names as for --device.", metavar="DEVICE"
    ),
    "adapters": (Adapters, None),
    "history": _option(
        str | None,
        None,
        "A history, by name or file: answers are learned there and drafted from. 'edgespec history' shows "
        "and deletes what was learned. Without the option nothing is learned.",
        metavar="NAME",
    ),
}
"""Options of commands that load a target and a drafter; :func:`load_model` reads them."""
PROMPTS: Group = {
    "prompt_cache": (PromptCache, True),
    "chat_template": (ChatTemplate, None),
    "keep_prompts": _option(
        bool,
        False,
        "Keep whole turns, prompts included, in the history, so that the drafter can learn from them.",
        "--keep-prompts",
    ),
}
"""Options of commands that answer a user."""
SAMPLING: Group = {
    "temperature": (Temperature, 0.0),
    "top_k": _option(int, 0, "Sample from the K most likely tokens; 0 is no limit."),
    "top_p": _option(
        float, 1.0, "Keep the most likely tokens whose probabilities add up to this; 1 keeps all."
    ),
    "min_p": _option(
        float, 0.0, "Keep tokens whose probability is at least this share of the most likely token's."
    ),
    "repetition_penalty": _option(float, 1.0, "Above 1 makes tokens seen before less likely."),
}
"""Options of sampling; :func:`sampling_options` reads them."""
REQUEST: Group = {
    **SAMPLING,
    "seed": _option(int | None, None, "Makes a sampled answer repeatable."),
    "stop": _option(list[str] | None, None, "End the answer before this text; may be repeated."),
    "thinking": _option(
        str | None,
        None,
        "Whether the model thinks before it answers, how hard (minimal, low, medium, high, xhigh, max), or "
        "for how many tokens at most; the chat template decides without it.",
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
"""Options of a request; :func:`request_options` reads them, and ``max_new_tokens``."""


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

    values = context.params | named
    limited = ("threads", "instructions", "max_waiting", "parallel", "chat_template", "keep_prompts")
    limits = {name: values[name] for name in limited if name in values}
    limits["adapters"] = tuple(values.get("adapters") or ())
    if not values.get(
        "prompt_cache"
    ):  # commands without the option measure, and the cache would falsify that
        limits["prompt_cache_bytes"] = 0
    places: dict[str, Any] = {
        name: values[name] for name in ("history", "device", "drafter_device") if name in values
    }
    drafter = None if values["drafter"] == "none" else values["drafter"]
    return {"target": values["target"], "drafter": drafter, "options": LoadOptions(**limits), **places}


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
    sources = {name: context.get_parameter_source(name) for name in SAMPLING}
    stated = (name for name, source in sources.items() if source is None or source.name != "DEFAULT")
    return cast("RequestOptions", {name: context.params[name] for name in stated})
