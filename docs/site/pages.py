"""What the site shows from outside of docs: its first page is the README. Links out of docs become text."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

README = Path(__file__).parents[2] / "README.md"
_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the first page."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """The page without links that lead nowhere in the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(kept, markdown)
