"""Several targets answer at once, in processes on this machine or on many: Ray (extra ``ray``)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import edgespec
from edgespec.align.answers import Answer, Answering, Asking, answer
from edgespec.prompts import Prompt
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cpu import default_threads

__all__ = ["answering_at_once"]


class _Worker:
    """A loaded model in a process of Ray's."""

    def __init__(self, names: tuple[str, str], threads: int) -> None:
        self._model = edgespec.load(*names, options=edgespec.LoadOptions(threads=threads))

    def answer(self, prompt: Prompt, asking: Asking) -> Answer | None:
        return answer(self._model, prompt, asking)


@contextmanager
def answering_at_once(
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
        EdgespecError: Ray is not installed, a model cannot be loaded, or a worker ended.
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
    ray.init(where, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        # Ray would wait for good where it has fewer cores than it is told that they need.
        worker = ray.remote(_Worker).options(num_cpus=0, scheduling_strategy="SPREAD")
        pool = ActorPool([worker.remote(names, threads) for _ in range(workers)])

        def answering(prompts: Sequence[Prompt]) -> Iterator[Answer | None]:
            try:
                yield from pool.map_unordered(
                    lambda each, prompt: each.answer.remote(prompt, asking), prompts
                )
            except ray.exceptions.RayActorError as error:
                cause = error.__cause__ or error
                raise EdgespecError(
                    f"a worker ended: {cause}. Run the same command again to go on"
                ) from error

        yield answering
    finally:
        ray.shutdown()
