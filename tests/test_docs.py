"""The documents: short enough to be read, links that lead somewhere, figures as the tool draws them."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import picture

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


def test_a_newcomer_is_done_soon() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 120
    assert len(design.split()) < 2500


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


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=lambda path: path.name
)
def test_pictures_are_drawings_for_light_and_dark_pages(path: Path) -> None:
    drawing = ElementTree.parse(path).getroot()
    style = drawing.find("{http://www.w3.org/2000/svg}style")
    assert drawing.get("aria-label")
    assert style is not None and "prefers-color-scheme" in str(style.text).replace(" ", "")
