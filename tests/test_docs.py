"""The documents: links lead somewhere, figures are as drawn, code runs, commands exist, the site is built."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import anthropic
import ollama
import openai
import pytest
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

import edgespec
from edgespec.cli import app
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.models import filling_tokenizer, toy_bundle, toy_model, toy_session
from tests.kit.serving import serving
from tests.kit.templates import HERMES
from tools import picture, tables
from tools.try_docs import FENCE, differences, updated

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_FILE = re.compile(r"`([\w./]+\.(?:py|h|cpp|inl|json|onnx|jinja))`")
_OF_A_BUNDLE = {"edgespec.json", "model.onnx", "tokenizer.json", "report.json", "chat_template.jinja"}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """File and anchor of every link that leads to a file of ours."""
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if not target.startswith(("http:", "https:", "mailto:")):
            name, _, anchor = target.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as links give them."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), f"{page.name} links to {file}, which does not exist"
        assert not anchor or anchor in anchors(file), f"{file.name} has no heading #{anchor}"


def test_every_page_of_the_lab_is_in_its_index() -> None:
    lab = ROOT / "docs" / "lab"
    listed = {file.name for file, _ in links(lab / "README.md") if file.parent == lab}
    assert listed >= {page.name for page in lab.glob("*.md")} - {"README.md"}


def test_files_that_the_architecture_names_exist() -> None:
    named = _FILE.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    missing = [name for name in named if name not in _OF_A_BUNDLE and not (ROOT / name).exists()]
    assert not missing


def test_figures_are_as_the_tool_draws_them() -> None:
    for path, text in picture.drawn().items():
        same = path.read_text(encoding="utf-8") == text
        assert same, f"{path.name} is not what figures.json says; run python -m tools.picture"


def test_tables_of_options_and_keys_are_those_of_the_code() -> None:
    for path, text in tables.drawn().items():
        same = path.read_text(encoding="utf-8") == text
        assert same, f"{path.name} is not what the code says; run python -m tools.tables"


def test_pictures_are_drawings_for_light_and_dark_pages() -> None:
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        drawing = ElementTree.parse(path).getroot()
        style = drawing.find("{http://www.w3.org/2000/svg}style")
        assert drawing.get("aria-label"), path.name
        assert style is not None and "prefers-color-scheme" in str(style.text), path.name


# Code and commands


def _fences(page: Path, language: str) -> list[str]:
    """What stands in a page as ``language``, but what a comment above it says is not run, and why."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    return [code for marked, name, code, _ in fences if name == language and not marked]


def _commands(page: Path) -> Iterator[str]:
    """The lines of a page that could be commands."""
    text = page.read_text(encoding="utf-8")
    yield from (line for _, _, code, _ in FENCE.findall(text) for line in code.splitlines())
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{name}.md" for name in ("quickstart", "apps", "requests"))]
)
def test_blocks_show_what_they_print(name: str) -> None:
    for marked, language, code, prints in FENCE.findall((ROOT / name).read_text(encoding="utf-8")):
        if language == "python" and not marked and "print(" in code:
            assert prints, f"{name}: no text says what this prints:\n{code}"


def test_texts_of_pages_are_compared_but_for_what_may_be_anything() -> None:
    assert not differences("a\nb ... tokens/s\n", "a\nb 3.5 tokens/s\n") and not differences("", "a")
    assert "it printed:\nc" in differences("a\nb ...\n", "c\nb 1\n")
    block, text = "```python\nprint(1)\n```\n", "```text\n{}\n```\n"
    page = updated(f"{block}a\n{block}{text.format(3)}{block}{text.format('...')}", ["1.5\n", "2\n", "7\n"])
    assert page == f"{block}{text.format('...')}a\n{block}{text.format(2)}{block}{text.format('...')}"


WITH_CODE = [page for page in PAGES if _fences(page, "python")]


def _load(target: str, *_: Any, tokenizer: Tokenizer | None = None, **__: Any) -> edgespec.Model:
    """A model by any name, whose template knows tools and no thoughts, of which random ones have no end."""
    model = toy_model(toy_session(), toy_session(), bundle=partial(toy_bundle, tokenizer=tokenizer))
    bundle = cast(Any, model.target)  # a stand-in, which can be changed
    bundle.manifest.name, bundle.chat_template = target, ChatTemplate(HERMES.replace("think>", "plan>"))
    return model


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loads: Callable[[Any], None]) -> None:
    loads(_load)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All clients ask a server with such a model, wherever they are told to ask."""
    with _load("qwen2.5-coder-1.5b-instruct") as model, serving(model) as url, ExitStack() as clients:
        asks = {
            (openai, "OpenAI"): partial(openai.OpenAI, base_url=f"{url}/v1", api_key="none"),
            (anthropic, "Anthropic"): partial(anthropic.Anthropic, base_url=url, api_key="none"),
            (ollama, "Client"): partial(ollama.Client, url),
        }
        for (package, name), ask in asks.items():
            # Left to the garbage collector, their sockets fail whichever test runs then.
            monkeypatch.setattr(package, name, lambda *_, ask=ask, **__: clients.enter_context(ask()))
        yield


@pytest.fixture
def fill(loads: Callable[[Any], None]) -> None:
    """Models have tokens to fill in the middle."""
    loads(partial(_load, tokenizer=filling_tokenizer()))


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_runs(page: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    if page.stem in ("server", "requests"):
        request.getfixturevalue({"requests": "fill"}.get(page.stem, page.stem))
    names: dict[str, Any] = {"edgespec": edgespec}
    for block in _fences(page, "python"):
        exec(compile(block, str(page), "exec"), names)  # noqa: S102 - that is the test
    if page.stem == "apps":
        out = capsys.readouterr().out
        # A busy machine may see the toy's 400 tokens before they are cancelled.
        assert re.search("^(cancelled|length) '", out, re.MULTILINE)
        assert "prompt is too long: " in out


def test_commands_and_their_options_exist() -> None:
    commands, named = get_command(app), set[str]()
    assert isinstance(commands, TyperGroup)
    for page in PAGES:
        for line in _commands(page):
            name, *words = line.partition("|")[0].split()[1:] or [""]
            if line.startswith("edgespec ") and name in commands.commands:
                named.add(name)
                command = commands.resolve_command(Context(commands), [name])[1]
                inner = [*getattr(command, "commands", {}).values(), command]
                known = {
                    option
                    for each in inner
                    for at in each.params
                    for option in (*at.opts, *at.secondary_opts)
                }
                unknown = {word for word in words if word.startswith("--")} - known - {"--help"}
                assert not unknown, f"{page.name}: edgespec {name} has no {unknown}"
    assert {"chat", "generate", "serve"} <= named


def test_tools_and_their_options_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            for tool, words in re.findall(r"python -m tools\.([\w.]+)([^`|]*)", line):
                if "of commit 5ca9c955" in line or "git checkout 5ca9c955" in line:
                    continue
                assert find_spec(f"tools.{tool}"), f"{page.name} names tools.{tool}, which is not there"
                options = {*re.findall(r"(?<= )--[a-z-]+", words)}
                if options:
                    monkeypatch.setattr(sys, "argv", [tool, "--help"])
                    with suppress(SystemExit):
                        import_module(f"tools.{tool}").main()
                    known = {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}
                    assert options <= known, f"{page.name}: tools.{tool} has no {options - known}"


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: edgespec\.(\w+)$", text, re.MULTILINE)) == set(edgespec.__all__)


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere, or a name that the reference does not find, ends it."""
    config = str(ROOT / "docs" / "site" / "mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config]
    command += ["--site-dir", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert "Answer a conversation" in reference and ":class:" not in reference
    loaded = re.compile(r"<(?:script|img|iframe|link rel=.?stylesheet)[^>]+(?:src|href)=.?(?:https?:)?//")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page.name
