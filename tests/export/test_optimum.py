"""Export through Optimum: its command stands for itself here, and writes what Optimum writes."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import edgespec
from edgespec.cli import app
from edgespec_export.optimum import export_with_optimum
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError
from tests.kit.foreign import ForeignSpec, write_optimum, write_written_out

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script with a shebang line")

STAND_IN = f"""#!{sys.executable}
import json, os, shutil, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.kit.foreign import ForeignSpec, write_optimum
from tests.kit.foreign import write_written_out
arguments = sys.argv[1:]
assert arguments[:3] == ["export", "onnx", "--model"]
assert arguments[4:6] == ["--task", "text-generation-with-past"]
assert os.environ["HF_HUB_OFFLINE"] == "1" and "PYTHONPATH" not in os.environ
source, out = Path(arguments[3]), Path(arguments[6])
says = json.loads((source / "config.json").read_text())
if "fails" in says:
    print("Loading", says["fails"], sep="\\n")
    sys.exit(3)
attention = says["attention"]
if attention == "written out":
    write_written_out(out / "x")
else:
    write_optimum(out / "x", ForeignSpec(attention=attention, positions=attention == "concat"))
for part in (out / "x").iterdir():
    shutil.move(part, out / part.name)
(out / "x").rmdir()
if "extra" in says:
    (out / "config.json").write_text(json.dumps({{"is_encoder_decoder": True}}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    script = tmp_path / "optimum-cli"
    script.write_text(STAND_IN, encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    return str(script)


def checkpoint(folder: Path, **says: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | says), encoding="utf-8")
    return folder


def run(source: Path, out: Path, program: str, *more: str) -> Result:
    """The command line."""
    arguments = ["export", str(source), "-o", str(out), "--via", "optimum", "--optimum-cli", program]
    return CliRunner().invoke(app, [*arguments, *more])


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"optimum-cli", "m"}


@pytest.mark.parametrize("attention", ["concat", "written out", "gqa"])
def test_what_it_writes_runs_and_its_cache_is_told(tmp_path: Path, program: str, attention: str) -> None:
    source, out = checkpoint(tmp_path / "m", attention=attention), tmp_path / "out"
    report = export_with_optimum(source, out, program=program)
    assert report["copies_cache"] == (attention != "gqa")
    assert report["architecture"] == ("llama" if attention == "written out" else "gpt2")
    assert report["bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert left(tmp_path) == {"out"}
    if attention == "written out":  # it is kept as it is
        assert report["row_exact"]
        expected = write_written_out(tmp_path / "m" / "expected")
        files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, expected)]
        assert files[0] == files[1]
    with edgespec.load(out, "ngram") as model:
        drafted = model.generate("a b a b a b a", max_new_tokens=8, stop_at_eos=False)
        plain = model.generate("a b a b a b a", max_new_tokens=8, stop_at_eos=False, speculate=False)
    assert drafted.tokens == plain.tokens


def test_the_command_line(tmp_path: Path, program: str) -> None:
    source, out = checkpoint(tmp_path / "m", attention="concat"), tmp_path / "out"
    result = run(source, out, program)
    assert result.exit_code == 0, result.output
    assert "KV cache: copied in every pass" in result.stdout
    again = run(source, out, program)
    assert again.exit_code == 1 and "exists" in again.stderr
    replaced = run(source, out, program, "--overwrite", "--json")
    assert replaced.exit_code == 0, replaced.output
    assert json.loads(replaced.stdout)["copies_cache"] is True


def test_what_optimum_does_not_do_is_refused(tmp_path: Path) -> None:
    for extra in (["--weights", "exact"], ["--mixed", "head"], ["--role", "drafter"]):
        result = run(tmp_path, tmp_path / "out", "optimum-cli", *extra)
        assert result.exit_code == 1 and "leave out --" in result.stderr


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"fails": "ValueError: no mamba"}, "failed with code 3: Loading / ValueError: no mamba"),
        ({"attention": "concat", "extra": "1"}, "an encoder and a decoder"),  # what cannot run is not kept
    ],
)
def test_what_fails_leaves_nothing(tmp_path: Path, program: str, says: dict[str, str], message: str) -> None:
    with pytest.raises(EdgespecError, match=message):
        export_with_optimum(checkpoint(tmp_path / "m", **says), tmp_path / "out", program=program)
    assert left(tmp_path) == set()


def test_sources_and_places_that_cannot_be(tmp_path: Path, program: str) -> None:
    (tmp_path / "empty").mkdir()
    for name, said in (("empty", r"lacks config\.json"), ("none", "does not exist")):
        with pytest.raises(ModelFileError, match=said):
            export_with_optimum(tmp_path / name, tmp_path / "out", program=program)
    source = checkpoint(tmp_path / "m")
    (tmp_path / "empty" / "letter.txt").write_text("dear")
    with pytest.raises(RequestError, match="is not overwritten"):
        export_with_optimum(source, tmp_path / "empty", program=program, overwrite=True)
    model = write_optimum(tmp_path / "model", ForeignSpec(attention="gqa"))
    with pytest.raises(RequestError, match="exists"):
        export_with_optimum(source, model, program=program)
    with pytest.raises(EdgespecError, match=r"no program 'no-such-cli'.*pip install optimum-onnx"):
        export_with_optimum(source, tmp_path / "out", program="no-such-cli")
