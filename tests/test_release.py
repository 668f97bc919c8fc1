"""What a release refuses, and what it leaves; its building and testing take minutes and run by hand."""

import hashlib
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tools import release
from tools.release import ReleaseError, audit, changes, committed, require_new, staged, write_sums

CHANGELOG = """# Changelog
## [Unreleased]
- Later.

## [0.2.0] - 2026-01-31
### Added
- New.

## [0.1.0] - 2025-12-31
- Old.

## [0.0.9] - 2025-11-30
"""


def git(folder: Path, *words: str) -> None:
    named = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(("git", *named, *words), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "root"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "a.txt").write_text("committed", encoding="utf-8")
    (root / ".gitignore").write_text("*.so\n", encoding="utf-8")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def test_the_changelogs_section_is_told_and_without_a_word_there_is_no_release() -> None:
    assert changes(CHANGELOG, "0.2.0") == "### Added\n- New.\n"
    assert changes(CHANGELOG, "0.1.0") == "- Old.\n"
    for version in ("0.3.0", "0.2", "0x2.0", "Unreleased", "0.0.9"):
        with pytest.raises(ReleaseError, match="tells nothing of"):
            changes(CHANGELOG, version)


def test_what_is_there_or_not_committed_is_refused(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    git(root, "tag", "v1.0.0")
    require_new(root, "1.0.0", out)  # this commit's own
    git(root, "commit", "--quiet", "--allow-empty", "--message", "second")
    with pytest.raises(ReleaseError, match=r"v1\.0\.0 is another commit's tag"):
        require_new(root, "1.0.0", out)
    require_new(root, "1.0.1", out)
    out.mkdir()
    with pytest.raises(ReleaseError, match="is there: delete it"):
        require_new(root, "1.0.1", out)
    out.rmdir()
    (root / "new.txt").write_text("", encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"not all is committed(.|\n)*new\.txt"):
        require_new(root, "1.0.1", out)


def test_what_is_built_is_what_is_committed(root: Path, tmp_path: Path) -> None:
    (root / "old.so").write_bytes(b"ignored by git")
    (root / "a.txt").write_text("changed", encoding="utf-8")
    source = committed(root, tmp_path)
    assert sorted(path.name for path in source.iterdir()) == [".gitignore", "a.txt"]
    assert (source / "a.txt").read_text(encoding="utf-8") == "committed"


def test_a_release_is_whole_or_not_there(tmp_path: Path) -> None:
    out = tmp_path / "dist" / "edgespec-1.0.0"
    with pytest.raises(ReleaseError), staged(out) as folder:
        (folder / "half").write_bytes(b"")
        raise ReleaseError("no wheel")
    assert list(out.parent.iterdir()) == []
    with staged(out) as folder:
        (folder / "one.whl").write_bytes(b"one")
        (folder / "two.tar.gz").write_bytes(b"two")
        write_sums(folder)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    lines = (out / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert lines == [
        f"{hashlib.sha256(b'one').hexdigest()}  one.whl",
        f"{hashlib.sha256(b'two').hexdigest()}  two.tar.gz",
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"name": "a", "vulns": []}], "1 of 1 packages audited"),
        ([{"name": "a", "vulns": []}, {"name": "b", "skip_reason": "404"}], "cannot be had: b"),
        ([{"name": "a", "vulns": [{"id": "X-1"}]}], "known vulnerabilities: (.|\n)*X-1"),
        (None, "Not audited: no connection"),
    ],
)
def test_an_audit_says_what_it_knows_and_what_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Any,
    message: str,
) -> None:
    out, vulnerable = tmp_path / "audit.json", "X-1" in message

    def run(*words: object, **settings: object) -> str:
        if "pip_audit" in words and found is not None:
            out.write_text(json.dumps({"dependencies": found}), encoding="utf-8")
        if "pip_audit" in words and (found is None or vulnerable):
            raise ReleaseError("pip_audit: code 1\nno connection")
        return ""

    monkeypatch.setattr(release, "run", run)
    with pytest.raises(ReleaseError, match=message) if vulnerable else nullcontext():
        audit(tmp_path, out)
    assert vulnerable or message in capsys.readouterr().out
