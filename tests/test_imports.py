"""What is imported: next to nothing by ``import edgespec``, and by a model only what it runs on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_for_tests import tiny_native

UNUSED = (
    *("edgespec.history", "edgespec.learning", "edgespec.loading.first_use", "edgespec_export"),
    *(
        "edgespec_models.downloads.catalog",
        "edgespec_models.downloads.download",
        "edgespec_models.downloads.hub",
        "edgespec_models.bundles.layers",
    ),
    *(
        "edgespec_models.text.chat_template",
        "edgespec_models.bundles.foreign_bundle",
        "edgespec_models.graphs",
    ),
    *("edgespec_runtimes.devices.cuda", "edgespec_runtimes.static.io", "edgespec_runtimes.static.session"),
    *("huggingface_hub", "filelock", "jinja2", "rich", "typer", "onnx", "onnx_ir", "onnxscript", "sqlite3"),
)
DRAFTER = ("edgespec.drafting.side", "edgespec.drafting.model", "edgespec.drafting.ahead")

IMPORT = """
import sys
before = set(sys.modules)
import edgespec
new = set(sys.modules) - before
print(*sorted(name for name in new if name.split(".")[0] not in sys.stdlib_module_names))
"""
GENERATE = """
import json, sys
import edgespec
with edgespec.load(*{models!r}, options=edgespec.LoadOptions(threads=1)) as model:
    result = model.generate("the cat and the dog and the cat", max_new_tokens=8, stop_at_eos=False)
assert len(result.tokens) == 8
print(json.dumps(sorted(sys.modules)))
"""


def _run(code: str, home: Path) -> str:
    code = f"import os, sys; sys.path[:] = {sys.path!r}; os.environ['EDGESPEC_HOME'] = {str(home)!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_edgespec_imports_next_to_nothing(tmp_path: Path) -> None:
    assert _run(IMPORT, tmp_path).split() == ["edgespec"]


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_a_model_imports_only_what_it_runs_on(tmp_path: Path, drafter: str | None) -> None:
    """No history, training, download or export, and no drafter model where there is none."""
    target = tiny_native(tmp_path / "target").path
    if drafter == "model":
        drafter = str(tiny_native(tmp_path / "drafter", seed=1, role="drafter").path)
    code = GENERATE.format(models=(str(target), drafter))
    imported: list[str] = json.loads(_run(code, tmp_path / "home"))
    unused = UNUSED if drafter and "drafter" in drafter else (*UNUSED, *DRAFTER)
    found = [name for name in imported if any(name == one or name.startswith(f"{one}.") for one in unused)]
    assert not found
    assert len([name for name in imported if name.startswith("edgespec")]) <= 75
