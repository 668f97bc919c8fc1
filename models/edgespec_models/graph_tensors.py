"""The inputs and outputs of a decoder graph that others exported."""

from dataclasses import dataclass

__all__ = ["CacheTensor", "GraphTensors"]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """Keys or values of one layer: ``(1, heads, tokens, head_dim)`` goes in, and comes out with more tokens.

    Attributes:
        past: the input's name.
        present: the output's name.
        heads: key-value heads.
        head_dim: width of a head.
        type: of an element, as numpy calls it.
    """

    past: str
    present: str
    heads: int
    head_dim: int
    type: str

    @property
    def values_per_token(self) -> int:
        """Numbers a token takes."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensors:
    """A decoder that reads ids, a mask of past and present, perhaps positions, and its KV cache.

    Attributes:
        ids: token ids, ``(1, n)``.
        mask: ones, ``(1, past + n)``; None where the graph has no such input.
        positions: of the ids, ``(1, n)``; None where the graph counts itself.
        logits: of every row, ``(1, n, vocabulary)``.
        cache: keys and values of every layer.
    """

    ids: str
    mask: str | None
    positions: str | None
    logits: str
    cache: tuple[CacheTensor, ...]
