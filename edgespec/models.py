"""Several models by name, each loaded when it is used, within a bound of memory."""

import atexit
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import TIMEOUT_MAX, Condition, Thread, current_thread, get_ident
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from edgespec.engine import Model, load
from edgespec.loading.footprint import plan_of
from edgespec.loading.opening import Reference
from edgespec.loading.options import LoadOptions
from edgespec.running.ticket import LOOK_S, InProcess
from edgespec_models.bundles.bundle import TOKENIZER, Bundle
from edgespec_models.errors import Closed, DeviceError, EdgespecError, RequestError
from edgespec_models.forks import check_process
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.schema import checked, within
from edgespec_models.storage import size
from edgespec_runtimes.memory import machine_memory

if TYPE_CHECKING:  # of use to models that are not loaded
    from edgespec.loading.first_use import Found

PLANNED_TOKENS = 2048
"""The tokens of the text with which a model's memory is counted."""
_LOG = logging.getLogger("edgespec.models")


class _User(Future[Model]):
    """A thread or a task (``owner``) that waits for a model, or uses it."""

    def __init__(self, name: str, owner: object, progress: ProgressCallback) -> None:
        super().__init__()
        self.name, self.owner, self.progress, self.uses = name, owner, progress, False


class Models(InProcess, AbstractContextManager["Models"]):
    """Models by name, loaded one after the other when they are used, from any thread or task.

    This is a context manager. If there is no room, idle models are unloaded, the least recently used first.
    If all are in use, the load waits, and later uses wait behind it.

    Args:
        models: by name, the target of :func:`edgespec.load`, or a mapping of its arguments.
        memory: the bytes that all models may take, as :func:`edgespec.plan` counts them with texts of 2,048
            tokens. None is the machine's memory.
        keep: the idle seconds after which a model is unloaded. With None it stays until another model needs
            the room.

    Attributes:
        names: all names.
        memory_bytes: the planned bytes of loaded models, by name.
    """

    @checked
    def __init__(
        self,
        models: Mapping[str, Reference | Mapping[str, Any]],
        *,
        memory: Annotated[int, within(1)] | None = None,
        keep: Annotated[float, within(0)] | None = None,
    ) -> None:
        self.names, self.memory_bytes = tuple(models), dict[str, int]()
        self._arguments: dict[str, Mapping[str, Any]] = {
            name: named if isinstance(named, Mapping) else {"target": named} for name, named in models.items()
        }
        self._memory, self._keep = memory, keep
        self._keeps: dict[str, float | None] = dict.fromkeys(models, keep)
        self._models, self._used_at = dict[str, Model](), dict[str, float]()
        self._users, self._changed = list[_User](), Condition()
        self._is_crowded = self._closed = False  # crowded: a load waits for room
        self._process = os.getpid()
        self._worker = Thread(target=self._work, name="edgespec-models", daemon=True)
        self._worker.start()
        atexit.register(self.close)

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def loaded(self) -> dict[str, Model]:
        """The loaded models. Outside of :meth:`use` they may be unloaded at any time."""
        return dict(self._models)

    @contextmanager
    def use(self, name: str, *, progress: ProgressCallback = ignore_progress) -> Iterator[Model]:
        """A model that stays loaded to the end of the block. It is loaded first if it is not loaded yet.

        Raises:
            RequestError: there is no such name.
            DeviceError: the model needs more than ``memory``, or would wait for a model that the caller uses.
            EdgespecError: an error of :func:`edgespec.load`, for all that wait. The next use loads again.
        """
        with self._asking(_User(name, get_ident(), progress)) as user:
            while not wait([user], LOOK_S).done:
                pass
            yield user.result()

    @asynccontextmanager
    async def use_async(
        self, name: str, *, progress: ProgressCallback = ignore_progress
    ) -> AsyncIterator[Model]:
        """:meth:`use` in an event loop; a load goes on when its task is cancelled."""
        import asyncio  # which programs without tasks need not load

        with self._asking(_User(name, asyncio.current_task(), progress)) as user:
            yield await asyncio.wrap_future(user)

    def found(self, name: str) -> "Found | None":
        """What a load opens: a bundle, or what is exported first, a file or an entry of the catalogue.

        None is a model that cannot be read, or that the hub has and this machine does not.
        """
        if (model := self.loaded.get(name)) is not None:
            return model.target
        from edgespec.loading.planning import look_up
        from edgespec_export.options import ExportOptions
        from edgespec_models.downloads.catalog import HubName

        arguments = self._arguments[name]
        options = arguments.get("options") or LoadOptions()
        with suppress(EdgespecError):
            export = ExportOptions(
                "target", options.weights, adapters=options.adapters, mmproj=options.mmproj
            )
            found = look_up(arguments["target"], export)
            if isinstance(found, Bundle) and options.chat_template is not None:
                found.use_template(options.chat_template)
            return None if isinstance(found, HubName) else found
        return None

    def unload(self, name: str) -> None:
        """Unload a model as soon as it is unused. The next use loads it again."""
        with self._changed:
            self._keeps[name] = 0.0
            self._changed.notify_all()

    def kept_s(self, name: str) -> float | None:
        """The seconds until an idle model is unloaded; None is until another needs the room."""
        with self._changed:
            due = {other: at for at, other in self._due()}.get(name)
        return self._keep if due is None else max(0.0, due - monotonic())

    def close(self) -> None:
        """Unload all models. Running requests end with the reason ``closed``. Any thread may call it."""
        if self._process != os.getpid():  # forked: there is nothing to end
            return
        with self._changed:
            self._closed = True
            self._fail(self._users, Closed("the models are closed"))
        if current_thread() is not self._worker:  # which runs the callbacks of loads
            self._worker.join()
        atexit.unregister(self.close)

    @contextmanager
    def _asking(self, user: _User) -> Iterator[_User]:
        if user.name not in self.names:
            raise RequestError(f"there is no model {user.name!r:.200}; allowed: {', '.join(self.names)}")
        check_process(self._process)
        with self._changed:
            if self._closed:
                raise Closed("the models are closed")
            self._users.append(user)
            self._give()
        try:
            yield user
        finally:
            with self._changed:
                self._users.remove(user)
                self._used_at[user.name] = monotonic()
                self._give()

    def _give(self) -> None:
        """Give loaded models to waiting users; while a load waits for room, only to those it waits for."""
        for user in self._waiting(self._models):
            may = not self._is_crowded or user.owner in self._owners()
            if may and user.set_running_or_notify_cancel():
                user.uses = True
                user.set_result(self._models[user.name])
        self._changed.notify_all()

    def _waiting(self, names: Iterable[str]) -> list[_User]:
        return [user for user in self._users if user.name in names and not user.done()]

    def _fail(self, users: Iterable[_User], error: BaseException) -> None:
        for user in users:
            if not user.done() and user.set_running_or_notify_cancel():
                user.set_exception(error)
        self._changed.notify_all()

    def _idle(self) -> list[str]:
        """The idle models, the least recently used first."""
        used = {user.name for user in self._users if user.uses}
        return sorted(self._models.keys() - used, key=self._used_at.__getitem__)

    def _due(self) -> list[tuple[float, str]]:
        """The idle models with the time of their unloading, the earliest first."""
        keeps = [(name, self._keeps[name]) for name in self._idle()]
        return sorted((self._used_at[name] + keep, name) for name, keep in keeps if keep is not None)

    def _owners(self) -> set[object]:
        return {user.owner for user in self._users if user.uses}

    def _work(self) -> None:
        """Load models that are wanted and unload idle ones, until :meth:`close`."""
        while not self._closed:
            with self._changed:
                users, due = self._waiting(set(self.names) - self._models.keys()), self._due()
                left = min(max(0.0, due[0][0] - monotonic()), TIMEOUT_MAX) if due else None
                if not users and left != 0 and not self._closed:
                    self._changed.wait(left)
                    continue
            if users:
                self._load(users[0].name)
            elif left == 0:
                self._unload(due[0][1])
        for name in self.loaded:
            self._unload(name)

    def _load(self, name: str) -> None:
        started = monotonic()
        tell, ready = partial(self._tell, name), partial(self._make_room, name)
        try:
            model = load(**self._arguments[name], progress=tell, ready=ready)
        except BaseException as error:  # noqa: BLE001 - raised where the model is waited for
            self.memory_bytes.pop(name, None)
            with self._changed:  # uses that came since a load failed wait for the next load
                self._fail([] if isinstance(error, Closed) else self._waiting([name]), error)
        else:
            _LOG.info("%s was loaded in %.1f s", name, monotonic() - started)
            with self._changed:
                self._models[name], self._used_at[name], self._keeps[name] = model, monotonic(), self._keep
        with self._changed:
            self._is_crowded = False
            self._give()

    def _tell(self, name: str, report: Progress) -> None:
        if self._closed:
            raise Closed("the models are closed")
        for user in self._waiting([name]):
            user.progress(report)

    def _make_room(self, name: str, target: Bundle, drafter: Bundle | None) -> None:
        needed = plan_of(target, drafter).fit(PLANNED_TOKENS).memory_bytes
        if self._memory is not None and needed > self._memory:
            needs = f"{name} needs {size(needed)}, and all models together may take {size(self._memory)}"
            raise DeviceError(f"{needs}; allow more memory, or take a smaller model or drafter='ngram'")
        while not self._has_room(needed):
            with self._changed:
                self._is_crowded, idle = True, self._idle()[:1]
                if not idle:
                    stuck = [user for user in self._users if user.owner in self._owners()]
                    self._fail(
                        stuck,
                        DeviceError(
                            "there is no room beside the model of the block around this one; leave that "
                            "block first"
                        ),
                    )
                    if self._closed or not self._waiting([name]):
                        raise Closed("nobody waits for it any more")
                    self._changed.wait(LOOK_S)
            for first in idle:
                self._unload(first)
        with self._changed:
            self._is_crowded, self.memory_bytes[name] = False, needed
            self._give()
        running = [
            bundle for model in self.loaded.values() for bundle in (model.target, model.drafter) if bundle
        ]
        known = {_vocabulary(bundle): bundle for bundle in running}
        for bundle in filter(None, (target, drafter)):
            same = known.get(_vocabulary(bundle))
            if TOKENIZER in bundle.manifest.files and same is not None:
                bundle.tokenizer = same.tokenizer

    def _has_room(self, needed: int) -> bool:
        """Whether so much fits beside the others. The load itself checks whether it fits alone."""
        allowed = self._memory is None or sum(self.memory_bytes.values()) + needed <= self._memory
        return not self._models or (allowed and needed <= machine_memory().available)

    def _unload(self, name: str) -> None:
        with self._changed:
            if name not in self._idle() and not self._closed:
                return  # another use was faster
            model = self._models.pop(name)
        try:
            model.close()
        except Exception:  # noqa: BLE001 - of a disk, perhaps; the others go on
            _LOG.exception("%s was not closed in order", name)
        self.memory_bytes.pop(name, None)
        _LOG.info("%s was unloaded", name)


def _vocabulary(bundle: Bundle) -> tuple[object, ...]:
    """The key that bundles with the same tokenizer share."""
    return bundle.manifest.files.get(TOKENIZER), bundle.config.vocab_size, bundle.marks
