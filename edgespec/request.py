"""What a request may say, checked once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, TypedDict

from edgespec.sampling import SamplingParams
from edgespec_models.errors import RequestError
from edgespec_models.schema import check_fields, form, shown, within

__all__ = ["Request", "RequestOptions"]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``chat``, their streams and twins, and of conversations.

    ``max_new_tokens`` (256), ``stop`` (strings that end the text), ``stop_at_eos`` (True), ``speculate``
    (True; False runs the same loop without drafts), ``cancelled`` (asked between passes, in a thread of the
    model's; such as ``threading.Event().is_set``), ``timeout`` (seconds from when the request is queued; the
    answer ends then, as far as it came; None), and the fields of :class:`edgespec.sampling.SamplingParams`.
    """

    max_new_tokens: int
    stop: Sequence[str]
    stop_at_eos: bool
    speculate: bool
    cancelled: Callable[[], bool]
    timeout: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None


_Stop = Annotated[str, form(r"[^\ud800-\udfff]+", "of one character or more, without lone surrogates")]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """:class:`RequestOptions` with defaults filled in."""

    max_new_tokens: Annotated[int, within(1, 2**31 - 1)] = 256
    stop: tuple[_Stop, ...] = ()
    stop_at_eos: bool = True
    speculate: bool = True
    cancelled: Callable[[], bool] = _never
    timeout: Annotated[float, within(above=0)] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, options: RequestOptions) -> "Request":
        """Check ``options``.

        Raises:
            RequestError: an unknown name, or a value of a wrong type or out of range.
        """
        sampling_names = {f.name for f in fields(SamplingParams)}
        own_names = {f.name for f in fields(cls)} - {"sampling"}
        unknown = options.keys() - sampling_names - own_names
        if unknown:
            allowed = ", ".join(sorted(own_names | sampling_names))
            raise RequestError(f"unknown option {', '.join(map(shown, sorted(unknown)))}; allowed: {allowed}")
        sampling = SamplingParams(**{k: v for k, v in options.items() if k in sampling_names})  # type: ignore[arg-type]
        return cls(**{k: v for k, v in options.items() if k in own_names}, sampling=sampling)  # type: ignore[arg-type]
