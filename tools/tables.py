"""Write ``docs/options.md`` and the lists of ``docs/json.md`` from the code.

Run ``python -m tools.tables`` when an option or a key has changed; a test compares its output with the files.
Names, defaults and ranges are those of the dataclasses, descriptions those of their docstrings, and names on
the command line and over HTTP those of the commands and of the requests' bodies.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

import typer
from typer.main import get_command

from edgespec.answering.results import GenerationStats
from edgespec.asking.request import Request, RequestOptions
from edgespec.cli.chat import chat
from edgespec.cli.generate import generate
from edgespec.cli.options import loading, prompts
from edgespec.cli.serve import serve
from edgespec.decoding.sampling import SamplingParams
from edgespec.loading.footprint import CacheSize, Footprint, Plan
from edgespec.loading.options import LoadOptions
from edgespec.serve.bodies import ChatBody, CompletionBody, InfillBody
from edgespec_models.schema import allowed, described
from edgespec_runtimes.memory import MachineMemory

_DOCS: Final = Path(__file__).parents[1] / "docs"
_END: Final = "<!-- generated: end -->"
_FLAGS: Final = {
    "speculate": "--no-speculation",
    "prompt_cache": "",
    "prompt_cache_bytes": "--no-prompt-cache",
    "max_waiting": "--max-waiting",
    "parallel": "--parallel",
    "instructions": "--instructions",
    "drafter": "",
}
_FIELDS: Final = {
    "template_args": "chat_template_kwargs",
    "thinking": "reasoning_effort",
    "repetition_penalty": "repetition_penalty, repeat_penalty",
    "max_new_tokens": "max_tokens, max_completion_tokens",
    "prompt_logprobs": "echo, logprobs",
    "on_progress": "return_progress",
}
_INTRODUCTION: Final = (
    "# Options\n"
    "Every option of a request, of a load and of the server. In parentheses: the default, the allowed "
    "values, the option of the command line, and the field over HTTP (*HTTP* alone: the name is the same). "
    "`python -m tools.tables` writes this page from the code. Examples are in [requests.md](requests.md), "
    "[apps.md](apps.md) and [server.md](server.md).\n"
)
_LOAD: Final = (
    "`edgespec.load(..., options=edgespec.LoadOptions(NAME=VALUE))`. `edgespec.load` itself takes the two "
    "models, `history`, `device`, `drafter_device`, `priority` and `progress` "
    "([reference.md](reference.md#loading), or `help(edgespec.load)`).\n"
)
_WORDS: Final = (
    (r"a (whole )?number (from |(?=above))", ""),
    (r"True or False or None", "bool, None"),
    (r" or None", ""),
    (r"True or False or", "bool,"),
    (r"True or False", "bool"),
    (r" \(\d+ is [\w ]+\)", ""),  # descriptions say it
    (r" to (2147483647|1152921504606846976)", " on"),
    (r" to \d+, twice the logical cores.*", " on"),
    (r"-9223372036854775808 to 18446744073709551615", "-2^63 to 2^64 - 1"),
    (r"(^|, )1$", r"\g<1>1 on"),
    (r"(^|, | or )0$", r"\g<1>0 on"),
    (r"a table, each key 0 on, each value ", "ids to "),
    (r"a list, each item a text .*", "texts"),
    (r"a JsonSchema .*", "`JsonSchema`, `Regex`, `Lark`, `Choice`, `AnyJson`"),
    (r"a (list|table)\b.*", r"a \1"),
    (r"^a text out of ", ""),
)
"""What annotations allow, in the words of the lists."""


def drawn(docs: Path = _DOCS) -> dict[Path, str]:
    """What the tool writes: file -> content."""
    page = docs / "json.md"
    return {docs / "options.md": _options(), page: _filled(page.read_text(encoding="utf-8"))}


def main() -> None:
    """Write both files."""
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8", newline="\n")


def _options() -> str:
    asking = {**_flags(generate), **_flags(chat)}
    sections = [
        _INTRODUCTION,
        "## Of a request",
        "Keyword arguments of `generate`, `chat`, `fill`, `stream` and their like.\n",
        *_requests(asking),
        "\n## Of a load",
        _LOAD,
        *_loads(asking | _flags(serve)),
        "\n## Of the server",
        "`edgespec serve` takes these, and the options of a load above.\n",
        *_server(),
    ]
    return "\n".join(sections) + "\n"


def _requests(flags: Mapping[str, str]) -> Iterable[str]:
    words = {**_described(Request), **_described(SamplingParams)}
    ranges = {**allowed(Request), **allowed(SamplingParams)}
    defaults = {**_defaults(Request), **_defaults(SamplingParams)}
    bodies = {field.name for body in (ChatBody, CompletionBody, InfillBody) for field in fields(body)}
    for name in RequestOptions.__annotations__:
        if name == "max_tokens":  # the second name of max_new_tokens
            continue
        shown = "`max_new_tokens`, `max_tokens`" if name == "max_new_tokens" else f"`{name}`"
        http = f"HTTP {_code(_FIELDS[name])}" if name in _FIELDS else "HTTP" if name in bodies else ""
        facts = defaults[name], _short(ranges[name]), _code(flags.get(name, "")), http
        yield _item(shown, facts, words[name])


def _loads(flags: Mapping[str, str]) -> Iterable[str]:
    ranges, defaults = allowed(LoadOptions), _defaults(LoadOptions)
    for name, words in _described(LoadOptions).items():
        yield _item(f"`{name}`", (defaults[name], _short(ranges[name]), _code(flags.get(name, ""))), words)


def _server() -> Iterable[str]:
    shared = {*loading(), *prompts(), "max_waiting", "parallel"}
    for option in _parameters(serve):
        if option.name not in shared:
            default = "" if option.default is None else f"`{option.default}`"
            yield _item(f"`{option.opts[0]}`", (default,), option.help or "")


def _item(name: str, facts: Iterable[str], words: str) -> str:
    """A line of a list."""
    known = "; ".join(fact for fact in facts if fact)
    return f"- {name} ({known}): {words}" if known else f"- {name}: {words}"


def _parameters(command: Callable[..., None]) -> list[Any]:
    """The options of a command, less its arguments and ``--help``."""
    single = typer.Typer(add_completion=False)
    single.command()(command)
    return [parameter for parameter in get_command(single).params if parameter.opts[0].startswith("--")]


def _flags(command: Callable[..., None]) -> dict[str, str]:
    """Options of a command by the name of their parameter, and those that have another name there."""
    return {str(option.name): option.opts[0] for option in _parameters(command)} | _FLAGS


def _described(cls: type) -> dict[str, str]:
    """What the docstring says of each attribute, as Markdown."""
    return {name: _markdown(text) for name, text in described(cls).items()}


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?\.?([\w.]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"`docs/(\w+\.md)`", r"[\1](\1)", text)


def _defaults(cls: Any) -> dict[str, str]:
    return {field.name: _default(field) for field in fields(cls)}


def _default(field: Any) -> str:
    if field.default is MISSING or callable(field.default) or field.default in ((), ""):
        return ""
    return f"`{field.default!r}`"


def _short(words: str) -> str:
    for pattern, short in _WORDS:
        words = re.sub(pattern, short, words)
    return words


def _code(text: str) -> str:
    return ", ".join(f"`{part}`" for part in text.split(", ")) if text else ""


def _filled(page: str) -> str:
    for name, rows in _keys().items():
        before, begin, rest = page.partition(f"<!-- generated: {name} -->\n")
        if begin:
            listed = "".join(f"- {key}: {meaning}\n" for key, meaning in rows)
            page = f"{before}{begin}{listed}{_END}{rest.partition(_END)[2]}"
    return page


def _keys() -> dict[str, list[tuple[str, str]]]:
    """Lists of keys, by name: each key of an object in JSON, and what the dataclass says of it."""
    model = Footprint(
        name="",
        state="here",
        weights_bytes=0,
        mapped=True,
        table_bytes=0,
        working_bytes=0,
        cache=CacheSize(kept=(), longest=0),
    )
    plan = Plan(model, None, MachineMemory(0, 0, limited=False), 0)
    return {
        "stats": _explained(GenerationStats().to_json(), GenerationStats),
        "plan": _explained(plan.to_json(), MachineMemory, Plan),
        "model": _explained(model.to_json(), CacheSize, Footprint),
    }


_RENAMED: Final = {
    "tokens_per_second": "tokens_per_s",
    "kv_type": "types",
    "kv_bytes_per_token": "bytes_per_token",
    "state_bytes": "bytes_per_sequence",
    "context_length": "longest",
    "memory_bytes": "total",
    "memory_available_bytes": "available",
    "memory_limited": "limited",
    "disk_free_bytes": "disk_free",
    "gpu_available_bytes": "gpu",
}


def _explained(value: Mapping[str, Any], *classes: type) -> list[tuple[str, str]]:
    """Each key with its meaning; a KeyError where the docstrings have none."""
    words: dict[str, str] = {}
    for cls in classes:
        words |= _described(cls) | _properties(cls)
    return [(f"`{key}`", words[_attribute(key, words)]) for key in value]


def _attribute(key: str, words: Mapping[str, str]) -> str:
    known = (_RENAMED.get(key, ""), key, f"{key.removesuffix('_ms')}_s")
    return next((name for name in known if name in words), key)


def _properties(cls: type) -> dict[str, str]:
    kinds = inspect.getmembers(cls, lambda member: isinstance(member, property))
    return {name: _markdown(" ".join((inspect.getdoc(kind) or "").split())) for name, kind in kinds}


if __name__ == "__main__":
    main()
