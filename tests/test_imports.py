"""What ``import edgespec`` gives and brings: next to nothing; and a model, only what it runs on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import edgespec
from tests.kit.native import tiny_native

UNUSED = (
    *("edgespec.history", "edgespec.loading.first_use", "edgespec.asking.tool_calls"),
    *("edgespec_export", "edgespec_models.downloads", "edgespec_models.graphs"),
    *("edgespec_models.bundles.foreign", "edgespec_models.bundles.foreign_bundle"),
    "edgespec_models.text.chat_template",
    *("edgespec_runtimes.cuda", "edgespec_runtimes.discovery", "edgespec_runtimes.static"),
    *("huggingface_hub", "filelock", "jinja2", "rich", "typer", "onnx", "onnx_ir", "onnxscript", "sqlite3"),
)
DRAFTER = ("edgespec.drafting.side", "edgespec.drafting.model")

IMPORT = """
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
    code = f"import os, sys; os.environ['EDGESPEC_HOME'] = {str(home)!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_name_can_be_imported_and_no_other() -> None:
    for name in edgespec.__all__:
        value = getattr(edgespec, name)
        assert value.__name__ == name and value.__doc__
    assert len(set(edgespec.__all__)) == len(edgespec.__all__)
    assert set(edgespec.__all__) == edgespec._HOMES.keys() <= set(dir(edgespec))
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = edgespec.lod


def test_importing_edgespec_imports_nothing_else(tmp_path: Path) -> None:
    assert _run(IMPORT, tmp_path).split() == ["edgespec"]


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_a_model_imports_only_what_it_runs_on(tmp_path: Path, drafter: str | None) -> None:
    """No history, training, download or export, and no drafter model where there is none."""
    target = tiny_native(tmp_path / "target").path
    if drafter == "model":
        drafter = str(tiny_native(tmp_path / "drafter", seed=1, role="drafter").path)
    code = GENERATE.format(models=(str(target), drafter))
    imported = json.loads(_run(code, tmp_path / "home"))
    unused = UNUSED if drafter not in (None, "ngram") else (*UNUSED, *DRAFTER)
    assert not [name for name in imported if any(f"{name}.".startswith(f"{one}.") for one in unused)]
