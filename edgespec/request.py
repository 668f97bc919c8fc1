"""What a request may say, checked once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict

from edgespec.sampling import SamplingParams
from edgespec_models.errors import RequestError

__all__ = ["Request", "RequestOptions"]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``stream``, ``chat`` and ``stream_chat``.

    ``max_new_tokens`` (256), ``stop`` (strings that end the text), ``stop_at_eos`` (True), ``speculate``
    (True; False runs the same loop without drafts), ``cancelled`` (asked between passes; may be set from
    another thread, such as ``threading.Event().is_set``), and the fields of
    :class:`edgespec.sampling.SamplingParams`.
    """

    max_new_tokens: int
    stop: Sequence[str]
    stop_at_eos: bool
    speculate: bool
    cancelled: Callable[[], bool]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """:class:`RequestOptions` with defaults filled in."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_at_eos: bool = True
    speculate: bool = True
    cancelled: Callable[[], bool] = _never
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def of(cls, options: RequestOptions) -> "Request":
        """Check ``options``.

        Raises:
            RequestError: an unknown name or a value out of range.
        """
        sampling_names = {f.name for f in fields(SamplingParams)}
        own_names = {f.name for f in fields(cls)} - {"sampling"}
        unknown = options.keys() - sampling_names - own_names
        if unknown:
            allowed = ", ".join(sorted(own_names | sampling_names))
            raise RequestError(f"unknown option {', '.join(sorted(unknown))}; allowed: {allowed}")
        if isinstance(options.get("stop", ()), str):
            raise RequestError(f"stop is {options['stop']!r}; give a list of strings")
        sampling = SamplingParams(**{k: v for k, v in options.items() if k in sampling_names})  # type: ignore[arg-type]
        own = {k: v for k, v in options.items() if k in own_names}
        request = cls(**own | {"stop": tuple(options.get("stop", ())), "sampling": sampling})  # type: ignore[arg-type]
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        return request
