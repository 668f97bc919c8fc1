"""Draws docs/figures/page.png and page-dark.png: ``python -m tools.page_picture``.

Serves a real model (pulled at first use), asks it on the page in a Chromium, and saves what that shows.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright
from PySide6.QtGui import QImage

import edgespec
from tests.kit.serving import serving

ROOT = Path(__file__).parents[1]
QUESTION = """Write a docstring for this function. Reply with the whole function.
```python
def slug(title, longest=40):
    words = re.findall(r"[a-z0-9]+", title.lower())
    while len("-".join(words)) > longest:
        words.pop()
    return "-".join(words)
```"""


def in_few_colours(png: bytes) -> QImage:
    """The picture in its 256 most frequent colours, which takes a third of the bytes."""
    image = QImage.fromData(png).convertToFormat(QImage.Format.Format_RGB32)
    colours, counts = np.unique(np.frombuffer(image.constBits(), np.uint32), return_counts=True)
    return image.convertToFormat(QImage.Format.Format_Indexed8, colours[np.argsort(counts)[-256:]].tolist())


def main() -> None:
    """Ask, wait, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    with edgespec.load(options.model) as model, serving(model) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 640}, device_scale_factor=2)
        page.goto(url)
        page.locator("#model").get_by_text(options.model).wait_for()
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
        page.locator(".cost").get_by_text("first token after").wait_for(timeout=600_000)
        in_few_colours(page.screenshot()).save(str(options.out / "page.png"))
        page.emulate_media(color_scheme="dark")
        in_few_colours(page.screenshot()).save(str(options.out / "page-dark.png"))
        browser.close()


if __name__ == "__main__":
    main()
