"""What tests share: nothing is measured into the user's own folders; consoles of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import measurements
from edgespec.cli.console import errors, output


@pytest.fixture(autouse=True, scope="session")
def no_stored_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that load models once for several tests."""
    folder = tmp_path_factory.mktemp("measurements")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "measurements_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for what this test measures; another test, on another clock, does not see it."""
    folder = tmp_path.with_name(f"{tmp_path.name}-measurements")
    monkeypatch.setattr(measurements, "measurements_dir", lambda: folder)
    return folder


@pytest.fixture
def consoles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wide, and this test's own: consoles are cached and hold the streams of the test before."""
    monkeypatch.setenv("COLUMNS", "200")
    for console in (output, errors):
        console.cache_clear()
    yield
    for console in (output, errors):
        console.cache_clear()
