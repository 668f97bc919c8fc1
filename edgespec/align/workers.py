"""Several targets answer at once, in processes on this machine or on many: Ray (extra ``ray``)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from edgespec.align.answering import answering
from edgespec.align.answers import Answer, Answering, Asking
from edgespec.measuring.prompts import Prompt
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cpu import default_threads

__all__ = ["answering_with_workers"]

_MOST = 32  # prompts that a worker is handed at a time: some answers end before others


class _Worker:
    """A loaded model in a process of Ray's."""

    def __init__(self, names: tuple[str, str], asking: Asking, threads: int) -> None:
        self._open = answering(names, asking, threads=threads)  # as long as the process
        self._answering = self._open.__enter__()

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        return list(self._answering(prompts))


@contextmanager
def answering_with_workers(
    names: tuple[str, str], asking: Asking, *, workers: int, threads: int = 0
) -> Iterator[Answering]:
    """What answers with so many workers, in no order; they end with the context.

    They run where the cluster that ``RAY_ADDRESS`` names has room, or else on this machine, on its loopback
    interface. Each machine finds the models under their names: by the catalogue, the hub or the same path.

    Args:
        names: target and drafter.
        asking: how prompts are asked.
        workers: how many.
        threads: of each; 0 takes all cores of a machine of the cluster, or shares this one's.

    Raises:
        EdgespecError: Ray is not installed, a model cannot be loaded, or the cluster or a worker
            is gone.
    """
    here = "RAY_ADDRESS" not in os.environ
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # or Ray would tell its makers
    if here:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
            "0"  # keeps it on the loopback interface, everywhere
        )
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise EdgespecError("several workers need Ray: pip install 'edgespec[ray]'") from error
    if here:
        threads = threads or max(1, default_threads() // workers)
    where = "local" if here else None
    try:
        ray.init(where, include_dashboard=False, log_to_driver=False, logging_level="error")
        # Ray would wait for good where it has fewer cores than it is told that they need.
        worker = ray.remote(_Worker).options(num_cpus=0, scheduling_strategy="SPREAD")
        pool = ActorPool([worker.remote(names, asking, threads) for _ in range(workers)])

        def answer(prompts: Sequence[Prompt]) -> Iterator[Answer | None]:
            size = max(1, min(_MOST, -(-len(prompts) // workers)))
            some = [prompts[at : at + size] for at in range(0, len(prompts), size)]
            for answers in pool.map_unordered(lambda one, each: one.answer.remote(each), some):
                yield from answers

        yield answer
    except EdgespecError:
        raise  # a model's, also from a worker
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise EdgespecError(f"the workers ended: {error}. Run the same command again to go on") from error
    finally:
        ray.shutdown()
