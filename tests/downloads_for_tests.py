"""A model in every source there is, and what a pull of it must leave."""

import hashlib
import random
from pathlib import Path

from edgespec_models.downloads.catalog import CatalogueEntry, HubFile, IndexPart, IndexParts
from edgespec_models.downloads.download import is_pulled

CONTENT = random.Random(7).randbytes(300_000)
CUTS = (0, 120_000, 240_000, 300_000)
PARTS = tuple(
    IndexPart(f"toy-part{i}", "1.0", f"toy/{i}.bin", CUTS[i + 1] - CUTS[i]) for i in range(len(CUTS) - 1)
)
HUB = HubFile("someone/toy", "toy.gguf")
WHOLE = IndexParts((IndexPart("toy-whole", "1.0", "toy/whole.bin", len(CONTENT)),))  # one run of pip


def entry_of(*sources: HubFile | IndexParts) -> CatalogueEntry:
    return CatalogueEntry(
        name="toy",
        title="Toy",
        architecture="llama",
        role="target",
        filename="toy.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="MIT",
        licence_url=None,
        parameters=1,
        drafter=None,
        sources=sources,
    )


BOTH = entry_of(HUB, WHOLE)
FROM_HUB = entry_of(HUB)
FROM_INDEX = entry_of(IndexParts(PARTS))


def assert_whole(home: Path) -> None:
    """The file, its record and the lock, and nothing that was on its way."""
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert is_pulled(BOTH)
    assert {path.name for path in home.iterdir()} <= {"toy.gguf", "toy.gguf.sha256", "toy.gguf.lock"}
