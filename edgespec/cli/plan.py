"""``edgespec plan``: the memory and disk space that models would need, before anything is loaded."""

from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import figure_table, output, print_json, say
from edgespec.cli.options import Drafter, JsonFlag, Target, of, shared
from edgespec.loading.options import LoadOptions
from edgespec_models.storage import size

if TYPE_CHECKING:
    from rich.table import Table

    from edgespec.loading.footprint import Footprint, Plan


_VERDICTS = {
    "fits": "fits",
    "from disk": "slow: each token would read {read} from the disk",
    "no": "does not fit",
}


@shared(of(LoadOptions, "kv", "mmproj", adapters="--adapter"))
def plan(
    typed: typer.Context,
    target: Target,
    drafter: Drafter = "auto",
    context: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Plan for a text of N tokens too, with its answer.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a target and its drafter would take of memory and disk, and whether this machine has it.

    Nothing is downloaded, exported or loaded. A text's KV cache grows with it, so there is a line for each
    of several lengths, and the longest that fits. A container's memory limit counts as the machine's memory.

    Examples:

        edgespec plan qwen2.5-coder-1.5b-instruct

        edgespec plan ./model.gguf --drafter none --context 16000

        edgespec plan ./target --drafter ./drafter --json
    """
    import edgespec

    drafts = None if drafter == "none" else drafter
    adapters, kv = tuple(typed.params["adapters"] or ()), typed.params["kv"]
    mmproj = typed.params["mmproj"]
    made = edgespec.plan(target, drafts, context=context, adapters=adapters, mmproj=mmproj, kv=kv)
    if as_json:
        print_json(made.to_json())
        return
    output().print(_models(made))
    output().print()
    output().print(_contexts(made))
    output().print()
    for line in _machine(made):
        say(line)


def _models(made: "Plan") -> "Table":
    from rich.markup import escape

    names = [escape(model.name) for model in made.models]
    table = figure_table("", *names, names=1 + len(names))
    rows = [_facts(model) for model in made.models]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _facts(model: "Footprint") -> dict[str, str]:
    cache = model.cache
    states = f", {size(cache.bytes_per_sequence)} of states" if cache.bytes_per_sequence else ""
    return {
        "on this machine": model.state if model.device is None else f"{model.state}, made for {model.device}",
        "weights": size(model.weights_bytes),
        "tables, mapped": size(model.table_bytes),
        "KV cache": f"{cache.types}, {size(cache.bytes_per_token)} a token{states}",
        "context": f"{cache.longest:,} tokens",
        "working memory": size(model.working_bytes),
    }


def _contexts(made: "Plan") -> "Table":
    table = figure_table("text, tokens", "KV cache", "memory in all", "", names=4)
    for fit in made.contexts:
        verdict = _VERDICTS[fit.verdict].format(read=size(fit.read_bytes))
        table.add_row(f"{fit.tokens:,}", size(fit.kv_bytes), size(fit.memory_bytes), verdict)
    return table


def _machine(made: "Plan") -> list[str]:
    machine = made.machine
    limit = ", the container's limit" if machine.limited else ""
    longest = f"{made.longest_context:,} tokens" if made.longest_context else "none"
    lines = [
        f"memory: {size(machine.available)} available of {size(machine.total)}{limit}",
        f"longest text that fits: {longest}",
    ]
    if made.disk_bytes:
        download = sum(model.download_bytes for model in made.models)
        lines.append(
            f"disk: {size(download)} to download, {size(made.disk_bytes - download)} to export; "
            f"{size(made.disk_free)} free"
        )
    if made.gpu_bytes:
        free = "its size is unknown" if made.gpu is None else f"{size(made.gpu.available)} available"
        lines.append(f"GPU: {size(made.gpu_bytes)} with a text of 8,192 tokens; {free}")
    return lines
