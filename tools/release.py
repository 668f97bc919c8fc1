"""A release in one folder, whole or not at all: wheels, sdist, changes, list of parts, audit, checksums.

Usage, from the repository's root: ``python -m tools.release make [--out DIR] [--target NAME ...]`` builds
what is committed, for the version in ``pyproject.toml``, tests this machine's wheel, and publishes nothing.
``python -m tools.release check WHEEL`` only tests a wheel, in an environment of its own. ``make`` needs the
extra ``release``. How a release is made: ``docs/releasing.md``.
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

from tests.kit.hf import config_of, write_checkpoint
from tests.kit.tokenizers import byte_level_json

ROOT = Path(__file__).resolve().parent.parent
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
PROGRAMS = "Scripts" if os.name == "nt" else "bin"
TOKENS = "16"


class ReleaseError(Exception):
    """Why there is no release."""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints; it sees no checkout on ``PYTHONPATH``. If it fails, the error is all it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, check=False)
    written, complained = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    if done.returncode:
        raise ReleaseError(f"{' '.join(words)}: code {done.returncode}\n{written}{complained}")
    return written


def changes(changelog: str, version: str) -> str:
    """The changelog's section of ``version``; its heading has a date."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    match = re.search(heading + r"(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise ReleaseError(
            f'CHANGELOG.md tells nothing of {version}: give what is under "Unreleased" the heading '
            f'"## [{version}] - YYYY-MM-DD", and commit'
        )
    return match[1].strip() + "\n"


def require_new(root: Path, version: str, out: Path) -> None:
    """Refuse what is not committed, and a version that is there; a tag may be on the commit itself."""
    unclean = run("git", "status", "--porcelain", cwd=root)
    if unclean:
        raise ReleaseError(f"not all is committed; commit it or put it away:\n{unclean}")
    tag = ("git", "tag", "--list", f"v{version}")
    if run(*tag, cwd=root) and not run(*tag, "--points-at", "HEAD", cwd=root):
        raise ReleaseError(f"v{version} is another commit's tag: give pyproject.toml the next version")
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


def build(source: Path, out: Path, targets: Sequence[str]) -> None:
    """Wheels and sdist; times in wheels are the commit's, so that they can be made again byte for byte."""
    moment = run("git", "log", "-1", "--format=%ct").strip()
    chosen = ("--target", *targets) if targets else ()
    wheels = (sys.executable, "-m", "tools.wheels", "--out", str(out), *chosen)
    print(run(*wheels, cwd=source, SOURCE_DATE_EPOCH=moment), end="", flush=True)
    run(sys.executable, "-c", SDIST, out, cwd=source, SOURCE_DATE_EPOCH=moment)


def fitting(folder: Path, scratch: Path) -> Path:
    """The wheel that pip takes on this machine."""
    choose = (sys.executable, "-m", "pip", "download", "--quiet", "--no-index", "--no-deps")
    run(*choose, "--only-binary", ":all:", "--find-links", folder, "--dest", scratch / "host", "edgespec")
    return next((scratch / "host").glob("*.whl"))


def check(wheel: Path, folder: Path) -> Path:
    """Export, inspect and run a tiny model with ``wheel`` alone; returns the folder of its programs."""
    venv.create(folder / "bare", with_pip=True)
    programs = folder / "bare" / PROGRAMS
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel.resolve(), cwd=folder)
    checkpoint = write_checkpoint(folder / "checkpoint", config_of("llama"))
    (checkpoint / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")

    def edgespec(*words: str) -> str:
        return run(programs / "edgespec", *words, cwd=folder, EDGESPEC_HOME=str(folder / "home"))

    stated = edgespec("--version").split()
    if stated != ["edgespec", wheel.name.split("-")[1]]:
        raise ReleaseError(f"{wheel.name} says that it is {stated}")
    edgespec("export", "checkpoint", "-o", "bundle")
    edgespec("inspect", "bundle", "--verify")
    command = ("generate", "bundle", "one two one two one", "--max-new-tokens", TOKENS, "--json")
    plain = json.loads(edgespec(*command, "--no-speculation"))["tokens"]
    drafted = json.loads(edgespec(*command, "--drafter", "ngram"))["tokens"]
    if not plain or plain != drafted:
        raise ReleaseError(f"{wheel.name}: tokens are {plain} without speculation, {drafted} with it")
    print(f"{wheel.name} exports a model and answers with {len(plain)} tokens", flush=True)
    return programs


def audit(programs: Path, out: Path) -> None:
    """Refuse packages with known vulnerabilities; say of which nothing could be learned."""
    tool = (sys.executable, "-m", "pip_audit", "--format", "json", "--output", out)
    try:
        run(*tool, "--path", run(programs / "python", "-c", PACKAGES).strip())
    except ReleaseError as error:
        if out.exists():
            raise ReleaseError(f"known vulnerabilities: {out.read_text(encoding='utf-8')}") from error
        print(f"Not audited: {str(error).splitlines()[-1]}")
        return
    packages = json.loads(out.read_text(encoding="utf-8"))["dependencies"]
    missed = [package["name"] for package in packages if "skip_reason" in package]
    print(f"{len(packages) - len(missed)} of {len(packages)} packages audited")
    if missed:
        print(f"Not audited, since their data cannot be had: {', '.join(missed)}")


def write_sums(folder: Path) -> None:
    """``SHA256SUMS`` of all files, in the form of sha256sum."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8", newline="\n")


def make(out: Path | None, targets: Sequence[str]) -> None:
    """The release of what is committed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    out = (out or ROOT / "dist" / f"edgespec-{version}").absolute()
    require_new(ROOT, version, out)
    notes = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    with tempfile.TemporaryDirectory() as scratch, staged(out) as folder:
        (folder / "CHANGES.md").write_text(notes, encoding="utf-8", newline="\n")
        build(committed(ROOT, Path(scratch)), folder, targets)
        programs = check(fitting(folder, Path(scratch)), Path(scratch))
        parts = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
        run(*parts, "--output-file", folder / "sbom.cdx.json", programs / "python")
        audit(programs, folder / "audit.json")
        write_sums(folder)
    print(f"Release {version}: {out}")


def main() -> None:
    """Read the command line; make or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="build and test a release")
    making.add_argument("--out", type=Path, help="the new folder (default: dist/edgespec-VERSION)")
    making.add_argument("--target", nargs="+", default=(), help="instead of all that tools.wheels knows")
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
