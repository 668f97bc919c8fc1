"""The commands: on a model that is made to order, on tiny files, and on a catalogue of one toy."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli import COMMANDS, app
from edgespec.cli.console import note, say
from edgespec.cli.serve import _name_of
from edgespec_models.downloads import catalog
from edgespec_models.errors import TokenizerError
from tests.kit.downloads import CONTENT, FROM_HUB, Hub
from tests.kit.fake_model import FakeModel, FakeStream
from tests.kit.gguf import tiny_gguf

Use = Callable[[FakeModel], list[tuple[Any, ...]]]
pytestmark = pytest.mark.usefixtures("consoles")


@pytest.fixture
def use(loads: Callable[[Any], None]) -> Use:
    """Has every load give this model; returns what is loaded: target, drafter, threads."""

    def install(model: FakeModel) -> list[tuple[Any, ...]]:
        loaded = list[tuple[Any, ...]]()

        def load(target: str, drafter: str | None = "auto", **settings: Any) -> FakeModel:
            loaded.append((target, drafter, settings["options"].threads))
            return model

        loads(load)
        return loaded

    return install


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_the_prompt_cache_is_shown_and_cleared(own_home: Path) -> None:
    assert json.loads(run("cache", "--json").stdout)["models"] == []
    for model, number in (("one-1f", 1), ("one-2f", 2), ("other-of-two-3f", 3)):
        folder = own_home / "prompt-cache" / model
        folder.mkdir(parents=True)
        for block in range(number):
            (folder / f"{block:064x}").write_bytes(b"x" * 1000)
    shown = json.loads(run("cache", "show", "--json").stdout)
    assert shown["path"] == str(own_home / "prompt-cache")
    assert shown["models"][0] == {"name": "one", "blocks": 3, "tokens": 96, "bytes": 3000}
    assert "other-of-two" in run("cache").stdout
    failed = run("cache", "clear", "oen")
    assert failed.exit_code == 1 and "there is: one, other-of-two" in failed.stderr
    assert json.loads(run("cache", "clear", "one", "--json").stdout) == {"blocks": 3, "bytes": 3000}
    assert "3 blocks deleted" in run("cache", "clear").stderr
    assert json.loads(run("cache", "show", "--json").stdout)["models"] == []


@pytest.mark.parametrize(
    ("command", "given", "limit"),
    [
        *(("generate t hello", (), None), ("generate t hello", ("--no-prompt-cache",), 0)),
        *(("bench t --limit 1", (), 0), ("bench t --limit 1", ("--prompt-cache",), None)),
        ("verify t --limit 1 --samples 0", (), 0),
    ],
)
def test_commands_use_the_prompt_cache_where_it_falsifies_nothing(
    loads: Callable[[Any], None], command: str, given: tuple[str, ...], limit: int | None
) -> None:
    limits = list[int | None]()

    def load(*names: str, options: Any, **settings: Any) -> FakeModel:
        limits.append(options.prompt_cache_bytes)
        return FakeModel()

    loads(load)
    run(*command.split(), *given)
    assert limits == [limit]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout and f"edgespec {command}" in result.stdout


def test_generate_streams_text_and_puts_the_cost_on_standard_error(use: Use) -> None:
    model = FakeModel()
    loaded = use(model)
    given = ("--drafter", "none", "--threads", "2", "--stop", "X", "--seed", "4")
    result = run("generate", "t", "hello", *given)
    assert (result.exit_code, result.stdout) == (0, "re: hello\n")
    assert "8 tokens" in result.stderr
    assert loaded == [("t", None, 2)]
    options = model.calls[0][1]
    assert (options["stop"], options["seed"], options["speculate"]) == (("X",), 4, True)
    assert run("generate", "t", "<|im_start|>", "--special").exit_code == 0
    prompt, options = model.calls[1]
    assert (prompt, options["special"]) == ("<|im_start|>", True)


@pytest.mark.parametrize("command", ["bench", "demo", "cost"])
def test_instructions_that_are_none_are_refused_before_a_model_is_sought(use: Use, command: str) -> None:
    loaded = use(FakeModel())
    result = run(command, *([] if command == "demo" else ["t"]), "--instructions", "sse9")
    assert (result.exit_code, loaded) == (1, [])
    assert "instructions" in result.stderr and "avx2" in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "verify", "demo", "cost"])
def test_threads_beyond_reason_are_refused_before_a_model_is_sought(use: Use, command: str) -> None:
    loaded = use(FakeModel())
    arguments = () if command == "demo" else ("no-such-model",)
    result = run(command, *arguments, "--threads", "9999", stdin="hello")
    assert result.exit_code == 2 and loaded == []
    assert "'--threads'" in result.stderr and "less than or equal to" in " ".join(result.stderr.split())
    assert "no-such-model" not in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("option", "value", "code", "says"),
    [
        ("--thinking", "maybe", 2, "'maybe' is unknown; allowed: on, off"),
        ("--prediction", "no-such-file", 1, "no-such-file"),
    ],
)
def test_wrong_requests_are_told_before_a_model_is_loaded(
    use: Use, command: str, option: str, value: str, code: int, says: str
) -> None:
    loaded = use(FakeModel())
    result = run(command, "t", option, value, stdin="hello")
    assert (result.exit_code, loaded) == (code, [])
    assert says in " ".join(result.stderr.split())


def test_generate_reads_standard_input_and_prints_json(use: Use) -> None:
    use(FakeModel(template=False))
    result = run("generate", "t", "--json", "--no-speculation", stdin="ünïcode\n")
    value = json.loads(result.stdout)
    assert value["text"] == "re: ünïcode\n" and value["finish_reason"] == "stop"
    assert len(value["tokens"]) == value["stats"]["new_tokens"] == 8
    assert value["stats"]["drafted"] == 0


def test_what_was_rolled_back_stands_beside_the_cost(use: Use) -> None:
    use(FakeModel(rolled_back=("the one", "the other")))
    result = run("generate", "t", "hello")
    assert "rolled back: the one, rolled back: the other" in " ".join(result.stderr.split())
    value = json.loads(run("generate", "t", "hello", "--json").stdout)
    assert value["stats"]["rolled_back"] == ["the one", "the other"]
    bench = run("bench", "t", "--limit", "2")
    assert "Rolled back in 2 answers: the other" in bench.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("chat t", "no chat template"),
        ("bench t --json {tmp}/no/out.json", "does not exist"),
        ("export {tmp}/none.gguf -o {tmp}/out", "does not exist"),
        ("export no-such-model -o {tmp}/out", "no-such-model"),
        ("inspect {tmp}", "is not a bundle"),
        ("serve a b --chat-template {tmp}/t --port 0", "--chat-template are for one target"),
        ("align d --target t --history h --prompts p --rank 4", "leave out --prompts, --rank"),
        ("align d --target t --history h --answers-only", "leave out --answers-only"),
    ],
)
def test_failures_come_before_loads_and_writes(use: Use, tmp_path: Path, arguments: str, says: str) -> None:
    loaded = use(FakeModel(template=False))
    result = run(*arguments.format(tmp=tmp_path).split(), stdin="hi\n")
    assert result.exit_code == 1 and says in " ".join(result.stderr.split())
    expected = [("t", "auto", 0)] if arguments.startswith("chat") else []
    assert list(tmp_path.iterdir()) == [] and loaded == expected


def test_an_empty_prompt_is_misuse_and_ctrl_c_ends_with_130(use: Use) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    use(FakeModel(on_call=interrupt))
    assert run("generate", "t", "-", stdin="").exit_code == 2
    assert run("generate", "t", "hello").exit_code == 130


def test_chat_keeps_the_conversation_until_it_is_cleared(use: Use) -> None:
    model = FakeModel()
    use(model)
    typed = "/help\nhi\nmore\n/stats\n/clear\n\nanew\n/what\n/quit\nnever\n"
    result = run("chat", "t", "--system", "S", stdin=typed)
    assert result.exit_code == 0
    assert [prompt for prompt, _ in model.calls] == ["S|hi", "S|hi|re: S|hi|more", "S|anew"]
    assert "re: S|hi\n" in result.stdout and '"new_tokens": 8' in result.stdout
    assert "/clear" in result.stderr and "/what is unknown" in result.stderr
    result = run("chat", "t", "--json", stdin="one\n\ntwo\n")
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == ["re: one", "re: one|re: one|two"]


def test_an_answer_that_fails_does_not_end_the_chat(use: Use) -> None:
    def fail(count: int) -> None:
        if count == 1:
            raise TokenizerError("the template failed")

    use(FakeModel(on_call=fail))
    result = run("chat", "t", stdin="hi\nagain\n")
    assert result.exit_code == 0 and "error: the template failed (/clear starts anew)" in result.stderr
    assert result.stdout.count("re: ") == 1 and "re: again\n" in result.stdout


def test_pictures_go_with_the_question(use: Use) -> None:
    model = FakeModel()
    use(model)
    assert run("generate", "t", "which?", "--image", "a.png", "--image", "b.png").exit_code == 0
    typed = "one\ntwo\n/image c.png\nthree\n"
    assert run("chat", "t", "--image", "a.png", stdin=typed).exit_code == 0
    assert run("chat", "t", "--json", "--image", "a.png", stdin="one\ntwo\n").exit_code == 0
    prompts = [prompt.replace("re: ", "").split("|")[-1] for prompt, _ in model.calls]
    assert prompts == ["<a.png><b.png>which?", "<a.png>one", "two", "<c.png>three", "<a.png>one", "two"]
    result = run("generate", "t", "which?", "--raw", "--image", "a.png")
    assert result.exit_code == 2 and "only the chat template shows pictures" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="os.kill with SIGINT ends the process on Windows")
@pytest.mark.usefixtures("own_signals")
def test_ctrl_c_stops_the_answer_and_not_the_chat(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(self: FakeStream) -> Iterator[str]:
        yield "some"
        os.kill(os.getpid(), signal.SIGINT)
        yield "more"

    model = FakeModel()
    use(model)
    monkeypatch.setattr(FakeStream, "__iter__", pieces)
    result = run("chat", "t", stdin="hi\nagain\n")
    assert result.exit_code == 0 and "more" not in result.stdout
    assert result.stderr.count("stopped; ") == len(model.calls) == 2


def test_bench_prints_a_table_and_writes_both_files(use: Use, tmp_path: Path) -> None:
    use(FakeModel())
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    result = run("bench", "t", "--limit", "6", "--json", str(figures), "--report", str(page))
    assert result.exit_code == 0
    assert "editing" in result.stdout and "2.00x" in result.stdout
    assert "6 of 6 answers are the same" in result.stdout
    assert json.loads(figures.read_text(encoding="utf-8"))["speedup"]["overall"] == pytest.approx(2.0)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_bench_that_is_stopped_shows_what_it_has(use: Use, tmp_path: Path) -> None:
    def interrupt(count: int) -> None:
        if count == 6:  # after the warm-up and one prompt, within the second
            raise KeyboardInterrupt

    use(FakeModel(on_call=interrupt))
    result = run("bench", "t", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 130
    assert "1 of 1 answers" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["complete"] is False


def test_verify_passes_and_fails_by_exit_code(use: Use) -> None:
    use(FakeModel())
    passed = run("verify", "t", "--limit", "2", "--samples", "40")
    assert passed.exit_code == 0
    assert "2 of 2 identical" in passed.stdout and passed.stdout.rstrip().endswith("passed")
    use(FakeModel(flips=("Write",)))
    failed = run("verify", "t", "--samples", "0", "--json")
    value = json.loads(failed.stdout)
    assert failed.exit_code == 1 and value["passed"] is False
    first = value["answers"]["first_differences"][0]
    assert first.keys() == {"prompt", "position", "plain", "speculative"}
    shown = run("verify", "t", "--samples", "0").stdout
    assert "failed:" in shown and f"{first['prompt']}, token 2" in shown


def test_demo_writes_its_report_and_says_what_to_try(use: Use, tmp_path: Path) -> None:
    loaded = use(FakeModel())
    page = tmp_path / "page.html"
    result = run("demo", "--report", str(page))
    assert result.exit_code == 0 and page.exists()
    assert loaded == [("qwen2.5-coder-1.5b-instruct", "smollm2-135m-qwen2.5-coder", 0)]
    assert "edgespec chat" in result.stdout and str(page) in result.stderr
    # Six prompts in four turns, each both ways.
    assert "At most 48 answers of 64 tokens" in " ".join(result.stderr.split())


def test_export_with_quantization_options(tmp_path: Path) -> None:
    source = str(tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf"))
    options = ("-o", str(tmp_path / "out"), "--bits", "4", "--mixed", "none", "--overwrite")
    for more, form in (((), "Q4_1"), (("--weights", "portable"), "int4/32+minimums")):
        result = run("export", source, *options, *more)
        assert result.exit_code == 0 and f"as {form}, relative error" in result.stdout
    shown = run("inspect", str(tmp_path / "out")).stdout
    assert "4-bit/mixed=none" in shown and "float32" in shown.partition("KV cache")[2]
    refused = run("export", source, "-o", str(tmp_path / "no"), "--weights", "exact", "--bits", "8")
    assert refused.exit_code == 1 and "exclude each other" in " ".join(refused.stderr.split())
    assert run("export", source, "-o", str(tmp_path / "no"), "--bits", "5").exit_code == 2
    assert not (tmp_path / "no").exists()


# The catalogue


@pytest.fixture
def toy(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a pull puts the catalogue's only model."""
    known = {"toy": FROM_HUB}
    monkeypatch.setattr(catalog, "entries", lambda: known)
    monkeypatch.setattr(catalog, "hub_names", dict[str, catalog.HubName])
    return home / "toy.gguf"


def test_the_package_is_a_program_too() -> None:
    run = [sys.executable, "-m", "edgespec", "--help"]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "Usage: python -m edgespec " in out and "bench" in out


def test_help_lists_every_command_and_imports_none() -> None:
    code = "from edgespec.cli import app; app(['--help'], standalone_mode=False)"
    code += "; import sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in out and line in " ".join(out.split()) for name, line in COMMANDS.items())
    loaded = set(out.splitlines()[-1].split())
    assert not {"numpy", "onnxruntime", "huggingface_hub", "edgespec.cli.models"} & loaded


def test_pull_prints_path_and_licence_and_replaces_what_is_damaged(toy: Path, hub: Hub) -> None:
    assert run("models").stdout.split()[-1] == "-"
    pulled = run("pull", "toy")
    assert pulled.stdout.splitlines() == [f"toy: {toy}", "  licence: MIT"]
    assert pulled.stderr.splitlines() == ["Downloading toy", "Checking toy"]
    assert run("models").stdout.split()[-1] == "yes"
    toy.write_bytes(CONTENT[::-1])
    checked = run("pull", "--check", "--json")
    assert "toy is damaged and will be replaced" in checked.stderr
    assert [model["path"] for model in json.loads(checked.stdout)] == [str(toy)]
    assert toy.read_bytes() == CONTENT


@pytest.mark.usefixtures("home")
def test_names_of_the_hub_are_listed() -> None:
    lines = {line.split()[0]: line for line in run("models").stdout.splitlines()}
    assert "about 2.5 GB" in lines["qwen3-4b"] and "about" not in lines["smollm2-135m-instruct"]
    (model,) = (entry for entry in json.loads(run("models", "--json").stdout) if entry["name"] == "qwen3-4b")
    assert model["reference"].startswith("hf:") and model["path"] is None


def test_a_pull_that_fails_is_one_line_and_exit_code_1(toy: Path) -> None:
    unknown = run("pull", "toy", "tov")  # before anything is fetched
    assert unknown.stderr.startswith(
        "error: no model 'tov' in the catalogue, and no such file or folder. Did "
    )
    assert unknown.stderr.endswith("Did you mean 'toy'? It has: toy\n")
    assert unknown.exit_code == 1 and not toy.parent.exists()
    failed = run("pull", "toy")
    assert (failed.exit_code, failed.stdout) == (1, "")
    message = "error: no source could deliver toy: could not reach the Hugging Face hub"
    assert failed.stderr.splitlines()[-1].startswith(message)


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would make emojis of ``:date:`` and ``:end:``."""
    line = "[bold]a[1:end:2] :date:"
    say(line)
    note(line)
    assert capsys.readouterr() == (f"{line}\n", f"{line}\n")


def test_a_file_of_the_hub_is_served_without_its_revision_in_its_name() -> None:
    names = {"hf:owner/name/F.gguf@main": "F", "hf:owner/name@main": "name", "folder/F.gguf": "F"}
    assert {target: _name_of(target) for target in names} == names


def test_misuse_is_exit_code_2_and_the_version_is_told() -> None:
    assert run("pull").exit_code == 2
    assert run("--version").stdout.startswith("edgespec ")
    mistyped = run("pul")
    assert mistyped.exit_code == 2 and "Did you mean 'pull'?" in mistyped.stderr
