"""The shape of a decoder, as sessions need it, of any exporter's graph."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from edgespec_models.errors import UnsupportedModelError
from edgespec_models.schema import check_fields, length, within

FloatType = Literal["float32", "float16"]
"""The number types that a graph of any shape computes in."""
Count = Annotated[int, within(1, 2**31 - 1)]
Layers = Annotated[int, within(1, 4096)]
"""Layers of a model: tables have a row for each, and the deepest models have some hundreds."""
Context = Annotated[int, within(8, 2**21)]
"""Positions: enough for the self-test of a session, and the rotary tables have a row for each."""
AGAIN = "The file is damaged or of another version; export the model again"
Factor = Annotated[float, within(above=0)]
MTP_ROWS: Final = 32_768
"""Default number of rows that a head takes from its target's LM head: rows of the most frequent tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a head drafts a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147).

    A block is the last known token and masks. Its rows see each other.

    Attributes:
        size: tokens of the longest block that the head was trained for.
        mask: the token that stands for an unknown one.
        anchored: the known token's row drafts the next token, and each mask's row the one behind it. Else
            rows draft the tokens that their masks stand for.
        causal: rows see only those before them.
        causal_windows: so it is in layers with a sliding window, whatever ``causal`` says of others.
        rank: of the bias by which a drafted token changes the next one's logits; 0 without.
        confident: the head also says how probable it is that a token is accepted.
    """

    size: Annotated[int, within(2, 256)]
    mask: Annotated[int, within(0, 2**31 - 1)]
    anchored: bool = False
    causal: bool = False
    causal_windows: bool = False
    rank: Annotated[int, within(0, 65_536)] = 0
    confident: bool = False

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)

    @property
    def longest(self) -> int:
        """Tokens that a block drafts at most."""
        return self.size if self.anchored else self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The shape of a decoder, as sessions need it, of any exporter's graph.

    Attributes:
        architecture: the family.
        vocab_size: rows of the LM head.
        num_layers: how many layers there are.
        context_length: positions the model was made for.
        feature_layers: layers of the target whose input a head reads.
        feature_width: width of that input.
        block: the blocks of a head that drafts several tokens in one pass.
    """

    architecture: Annotated[str, length(1)]
    vocab_size: Count
    num_layers: Layers
    context_length: Context
    feature_layers: tuple[Annotated[int, within(0, 4095)], ...] = ()
    feature_width: Annotated[int, within(0, 2**31 - 1)] = 0
    block: Block | None = None

    @property
    def is_head(self) -> bool:
        """Whether the model drafts from states of its target.

        EAGLE-3's and DFlash's heads do (arXiv 2503.01840, 2602.06036), MTP layers (arXiv 2412.19437), and the
        assistants of Gemma 4.
        """
        return bool(self.feature_layers)

    @property
    def reads_cache(self) -> bool:
        """Whether it attends to keys and values of its target, and has none of its own."""
        return False

    def attended(self, tokens: int) -> float:
        """Tokens that a layer attends to with ``tokens`` in the KV cache, the mean of all layers."""
        return float(tokens)
