"""A release in one folder, whole or not at all: wheels, sdist, changes, list of parts, audit, checksums.

Usage, from the repository's root: ``python -m tools.release make [--out DIR] [--target NAME ...]`` builds what
is committed, for the version in ``pyproject.toml``, tests this machine's wheel, and publishes nothing.
``python -m tools.release check WHEEL`` only tests a wheel, in an environment of its own. Needs the extra
``release``. How a release is made: ``docs/releasing.md``.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hf_for_tests import config_of, write_checkpoint
from tests.tokenizers_for_tests import byte_level_json
from tools.wheels import TARGETS

from targets import native_target  # tools.wheels knows where it is

ROOT = Path(__file__).resolve().parent.parent
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
TOKENS = 16


class ReleaseError(Exception):
    """Why there is no release."""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints; where it fails, the last that it says is the error."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise ReleaseError(f"{words} failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_of(root: Path) -> str:
    """The version that ``pyproject.toml`` gives."""
    with (root / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def changes(changelog: str, version: str) -> str:
    """The changelog's section of ``version``; its heading has a date."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    found = re.search(heading + r"(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseError(
            f'CHANGELOG.md tells nothing of {version}: give what is under "Unreleased" the heading '
            f'"## [{version}] - YYYY-MM-DD", and commit'
        )
    return found[1].strip() + "\n"


def require_new(root: Path, version: str, out: Path) -> None:
    """Refuse what is not committed, and a version that is there."""
    unclean = run("git", "status", "--porcelain", cwd=root)
    if unclean:
        raise ReleaseError(f"not all is committed; commit it or put it away:\n{unclean}")
    if run("git", "tag", "--list", f"v{version}", cwd=root):
        raise ReleaseError(f"there is a tag v{version}: give pyproject.toml the next version")
    if out.exists():
        raise ReleaseError(f"{out} is there: delete it, or give pyproject.toml the next version")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder that is at ``out`` when all went well, and gone if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".release-", dir=out.parent))
    try:
        made = folder / out.name
        made.mkdir()
        yield made
        made.rename(out)
    finally:
        shutil.rmtree(folder)


def committed(root: Path, folder: Path) -> Path:
    """A copy of what is committed, and of nothing else."""
    archive = folder / "source.tar"
    run("git", "archive", "--output", archive, "HEAD", cwd=root)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    return folder / "source"


def build(source: Path, out: Path, targets: Sequence[str]) -> Path:
    """Wheels and sdist; returns this machine's wheel. Times in archives are the commit's."""
    moment = run("git", "log", "-1", "--format=%ct").strip()
    command = (sys.executable, "-m", "tools.wheels", "--out", out, "--target", *targets)
    print(run(*command, cwd=source, SOURCE_DATE_EPOCH=moment), end="", flush=True)
    run(sys.executable, "-c", SDIST, out, cwd=source, SOURCE_DATE_EPOCH=moment)
    return next(out.glob(f"*-py3-none-{native_target().tag}.whl"))


def bare_environment(folder: Path, wheel: Path) -> Path:
    """An environment with nothing but ``wheel`` and what it needs; the folder of its programs."""
    venv.create(folder / "bare", with_pip=True)
    programs = folder / "bare" / SCRIPTS
    run(programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}[export]", cwd=folder)
    return programs


def check(wheel: Path, folder: Path) -> Path:
    """Export, inspect and run a tiny model with ``wheel`` alone; returns the folder of its programs."""
    programs = bare_environment(folder, wheel.resolve())
    checkpoint = write_checkpoint(folder / "checkpoint", config_of("llama"))
    (checkpoint / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")

    def edgespec(*words: str) -> str:
        # Where it runs there is no checkout, and nothing leads to one.
        variables = {"PYTHONPATH": "", "EDGESPEC_HOME": str(folder / "home")}
        return run(programs / "edgespec", *words, cwd=folder, **variables)

    version = wheel.name.split("-")[1]
    if edgespec("--version").split() != ["edgespec", version]:
        raise ReleaseError(f"{wheel.name} says that it is {edgespec('--version').strip()}")
    edgespec("export", "checkpoint", "-o", "bundle")
    edgespec("inspect", "bundle", "--verify")
    asked = ("generate", "bundle", "one two one two one", "--max-new-tokens", str(TOKENS), "--json")
    answers = [
        json.loads(edgespec(*asked, *more)) for more in (("--drafter", "ngram"), ("--no-speculation",))
    ]
    if len({tuple(answer["tokens"]) for answer in answers}) != 1 or not answers[0]["tokens"]:
        raise ReleaseError(f"{wheel.name}: answers with and without speculation differ: {answers}")
    print(f"{wheel.name} exports and answers, {len(answers[0]['tokens'])} tokens", flush=True)
    return programs


def list_parts(programs: Path, out: Path) -> None:
    """A CycloneDX list of the packages that the environment holds."""
    tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    run(*tool, "--output-file", out, programs / "python")


def audit(programs: Path, out: Path) -> None:
    """Refuse packages with known vulnerabilities; where the data cannot be had, say so."""
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = run(programs / "python", "-c", place).strip()
    tool = (sys.executable, "-m", "pip_audit", "--path", packages, "--skip-editable", "--format", "json")
    done = subprocess.run([*tool, "--output", str(out)], capture_output=True, text=True, check=False)
    if not out.exists():
        print(f"Not audited, no data could be had: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return
    found = [
        each for each in json.loads(out.read_text(encoding="utf-8"))["dependencies"] if each.get("vulns")
    ]
    if found:
        raise ReleaseError(f"known vulnerabilities: {json.dumps(found, indent=1)}")


def write_sums(folder: Path) -> None:
    """``SHA256SUMS`` of all files, in the form of sha256sum."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8", newline="\n")


def make(out: Path | None, targets: Sequence[str]) -> None:
    """The release of what is committed."""
    version = version_of(ROOT)
    out = (out or ROOT / "dist" / f"edgespec-{version}").absolute()
    require_new(ROOT, version, out)
    told = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    with tempfile.TemporaryDirectory() as scratch, staged(out) as folder:
        (folder / "CHANGES.md").write_text(told, encoding="utf-8", newline="\n")
        wheel = build(committed(ROOT, Path(scratch)), folder, targets)
        programs = check(wheel, Path(scratch))
        list_parts(programs, folder / "sbom.cdx.json")
        audit(programs, folder / "audit.json")
        write_sums(folder)
    print(f"Release {version}: {out}")


def main() -> None:
    """Read the command line; make or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="build and test a release")
    making.add_argument("--out", type=Path, help="the new folder (default: dist/edgespec-VERSION)")
    names = [target.name for target in TARGETS]
    making.add_argument("--target", nargs="+", choices=names, default=names, help="instead of all")
    commands.add_parser("check", help="test a wheel").add_argument("wheel", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "make":
            make(options.out, options.target)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                check(options.wheel, Path(scratch))
    except ReleaseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
