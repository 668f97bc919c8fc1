"""Whether exports make other bundles, and whose recipe has to rise: `python -m tools.recipes`.

Makes the tiny bundles of ``tests/kit/whole.py`` and compares digests of their files with the table
``tests/golden/bundles.json``. It says which files of which bundles are others, and writes the table if every
device whose bundles changed has another recipe (``edgespec_export/recipe.py``), since users' caches would
open the old bundles otherwise. Bundles of sources that changed too, and new ones, need no other recipe.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.storage import write_text
from tests.kit.whole import BUNDLES, Digests
from tools.arguments import arguments

TABLE = Path(__file__).parents[1] / "tests/golden/bundles.json"
_SHOWN = 6


def read_table() -> dict[str, Any]:
    """The stored ``recipes`` by device, and ``bundles``, whose digests have names of files."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def named(recipes: Mapping[ExportDevice | None, int]) -> dict[str, int]:
    """Recipes as the table has them."""
    return {device or "cpu": recipe for device, recipe in recipes.items()}


def changes(
    before: Mapping[str, Digests], after: Mapping[str, Digests]
) -> dict[ExportDevice | None, dict[str, list[str]]]:
    """By device and file, the bundles that differ though their source does not."""
    found: dict[ExportDevice | None, dict[str, list[str]]] = {}
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        differing = sorted(file for file in old.keys() | new.keys() if old.get(file) != new.get(file))
        if "source" not in differing:
            for file in differing:
                found.setdefault(BUNDLES[name].device, {}).setdefault(file, []).append(name)
    return found


def main() -> None:
    """Compare, say what changed, and write the table where nothing is missing."""
    arguments(__doc__)
    table: dict[str, Any] = read_table() if TABLE.exists() else {"recipes": {}, "bundles": {}}
    made = {}
    for name, whole in BUNDLES.items():
        with tempfile.TemporaryDirectory() as folder:
            made[name] = whole.digests(Path(folder))
    unraised = []
    for device, files in changes(table["bundles"], made).items():
        place = named({device: RECIPES[device]})
        for file, names in sorted(files.items()):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            print(f"{file} for {', '.join(place)} differs: {', '.join(sorted(names)[:_SHOWN])}{more}")
        unraised += [
            f"{name} from {number}" for name, number in place.items() if table["recipes"][name] == number
        ]
    if unraised:
        raise SystemExit(
            f"Exports make other bundles of the same sources. Raise RECIPES in edgespec_export/recipe.py "
            f"({', '.join(unraised)}), or caches go on with old bundles; then run this again. If the change "
            "is not meant, undo it."
        )
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(digests)}" for name, digests in made.items())
    recipes = json.dumps(named(RECIPES))
    write_text(TABLE, f'{{\n "recipes": {recipes},\n "bundles": {{\n{rows}\n }}\n}}\n')
    new, gone = made.keys() - table["bundles"].keys(), table["bundles"].keys() - made.keys()
    print(f"{TABLE} is written: {len(made)} bundles, {len(new)} of them new, {len(gone)} left out.")


if __name__ == "__main__":
    main()
