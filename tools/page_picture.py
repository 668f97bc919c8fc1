"""Draws docs/figures/page.png and page-dark.png: ``python -m tools.page_picture``.

Serves a real model (pulled at first use), asks it on the page in a Chromium, and saves what that shows.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

import edgespec
from tests.serving_for_tests import serving

ROOT = Path(__file__).parents[1]
QUESTION = """Add type hints, and skip empty lines. Give the function alone.
```python
def read_settings(path):
    settings = {}
    for number, line in enumerate(open(path, encoding="utf-8"), start=1):
        name, equals, value = line.partition("=")
        if not equals:
            raise ValueError(f"{path}, line {number}: expected NAME = VALUE, got {line!r}")
        settings[name.strip()] = value.strip()
    return settings
```"""


def main() -> None:
    """Ask, wait, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    with edgespec.load(options.model) as model, serving(model) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 600}, device_scale_factor=2)
        page.goto(url)
        page.locator("#model").get_by_text(options.model).wait_for()
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
        page.locator(".cost").get_by_text("first token after").wait_for(timeout=600_000)
        for scheme, name in (("light", "page.png"), ("dark", "page-dark.png")):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=options.out / name)
        browser.close()


if __name__ == "__main__":
    main()
