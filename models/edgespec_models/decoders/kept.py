"""The tensors that a sequence keeps between passes: outputs of a graph that are its next inputs.

Keys and values have a row for each token. A layer with a state keeps it in a slot that the sequence owns,
with a log of the last rows by position, so that rows of a pass can be undone. Small states are also kept for
the end of each block of tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Final, Literal

import numpy as np

from edgespec_models.decoders.config import Count
from edgespec_models.errors import BundleError
from edgespec_models.schema import length

KeptType = Literal["float32", "float16", "int8", "uint8", "uint16"]
"""Edgespec's kernels and foreign graphs keep float16 or int8, graphs for GPUs float16, and graphs with
quantized activations uint8 and uint16."""
LOGGED: Final = 16
"""Rows of a pass that a layer with a state can undo."""
SCALED: Final = 32
"""Channels of keys of 8 bits that share a scale of 2 bytes."""
BLOCK: Final = 32
"""Tokens of a block."""
EXTENT: Final = 8
"""The number of blocks whose keys of a head lie together in a pool, and likewise their values."""
_LATENT: Final = ".latent"
_MOST_BYTES: Final = 1 << 30  # of a row or a state; NumPy can count the bytes of any context of such rows


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor of one layer that a sequence keeps.

    Attributes:
        input: its name in the graph before a pass.
        output: its name behind the pass.
        per: ``token`` for keys and values, which have a row for each token; ``sequence`` for a state, or a
            log; ``block`` for the rows from which a layer goes on at the end of each :data:`BLOCK` tokens.
        shape: shape of a token's row, ``(heads, width)``, or of the whole.
        type: type of an element.
    """

    input: Annotated[str, length(1)]
    output: Annotated[str, length(1)]
    per: Literal["token", "block", "sequence"]
    shape: Annotated[tuple[Count, ...], length(1, 4)]
    type: KeptType

    def __post_init__(self) -> None:
        if self.per == "token" and len(self.shape) != 2:
            raise BundleError(f"{self.input} has rows of shape {self.shape}; allowed: heads and width")
        if self.nbytes > _MOST_BYTES:
            raise BundleError(
                f"{self.input} has {self.nbytes:,} bytes a {self.per}; allowed: {_MOST_BYTES:,}"
            )

    @property
    def layer(self) -> int:
        """Its layer, in a graph that edgespec builds."""
        return int(self.input.split(".")[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of an element."""
        return np.dtype(self.type)

    @property
    def nbytes(self) -> int:
        """Bytes of a token's row, of a block, or of the state."""
        return prod(self.shape) * self.dtype.itemsize

    def of_tokens(self, tokens: int) -> tuple[int, ...]:
        """Shape of keys or values of this many tokens: ``(1, heads, tokens, width)``."""
        heads, width = self.shape
        return 1, heads, tokens, width

    def of_blocks(self, blocks: int) -> tuple[int, ...]:
        """Shape of a pool: ``(blocks / 8, heads, 256, width)``, or ``(blocks, *shape)``."""
        if self.per == "block":
            return blocks, *self.shape
        heads, width = self.shape
        return blocks // EXTENT, heads, EXTENT * BLOCK, width


def keys_and_values(layer: int, heads: int, width: int, kind: KeptType) -> tuple[KeptTensor, KeptTensor]:
    """The tensors that attention keeps in a graph of edgespec's."""
    key, value = (
        KeptTensor(
            input=f"past_key_values.{layer}.{name}",
            output=f"present.{layer}.{name}",
            per="token",
            shape=(heads, width),
            type=kind,
        )
        for name in ("key", "value")
    )
    return key, value


def in_bytes(kept: Iterable[KeptTensor]) -> tuple[KeptTensor, ...]:
    """The same tensors with keys and values in 8 bits: a row has its numbers and its scales, of 2 bytes.

    Raises:
        BundleError: a row is no multiple of the channels that share a scale, or attention is latent.
    """
    tensors = tuple(kept)
    for tensor in tensors:
        if tensor.per == "token" and (tensor.shape[1] % SCALED or tensor.input.endswith(_LATENT)):
            raise BundleError(
                f"{tensor.input} has rows of {tensor.shape[1]} numbers, which are kept in 16 bits alone: in "
                f"8 bits rows have whole groups of {SCALED}, and are no latent keys; load it without kv"
            )
    return tuple(
        replace(tensor, type="int8", shape=(tensor.shape[0], tensor.shape[1] + 2 * _scales(tensor)))
        if tensor.per == "token"
        else tensor
        for tensor in tensors
    )


def _scales(tensor: KeptTensor) -> int:
    """Scales of a head's row in 8 bits: values have one."""
    return 1 if tensor.input.endswith(".value") else tensor.shape[1] // SCALED


def latent_keys(layer: int, width: int) -> KeptTensor:
    """The tensor that latent attention keeps: keys, which begin with the values."""
    return KeptTensor(
        input=f"past_key_values.{layer}{_LATENT}",
        output=f"present.{layer}.latent",
        per="token",
        shape=(1, width),
        type="float16",
    )


def last_inputs(layer: int, channels: int, taps: int) -> KeptTensor:
    """The last inputs of a convolution over tokens: a ring, where token t has row t modulo the length."""
    return KeptTensor(
        input=f"past_inputs.{layer}",
        output=f"present_inputs.{layer}",
        per="sequence",
        shape=(LOGGED + taps - 1, channels),
        type="float32",
    )


def block_ends(layer: int, channels: int, taps: int) -> KeptTensor:
    """The inputs of a convolution before the end of each block; these rows do not lie in the ring."""
    return KeptTensor(
        input=f"past_ends.{layer}",
        output=f"present_ends.{layer}",
        per="block",
        shape=(taps - 1, channels),
        type="float32",
    )


def delta_states(
    layer: int, state: tuple[int, int, int, int], logged: int, channels: int, taps: int
) -> tuple[KeptTensor, KeptTensor, KeptTensor]:
    """The tensors of a delta net: ``state``, rows of ``logged`` numbers that it lacks yet, and inputs.

    Row t of the log is of token t modulo its length.
    """
    states, log = (
        KeptTensor(
            input=f"past_{name}.{layer}",
            output=f"present_{name}.{layer}",
            per="sequence",
            shape=shape,
            type="float32",
        )
        for name, shape in (("state", state), ("log", (LOGGED, logged)))
    )
    return states, log, last_inputs(layer, channels, taps)


def bytes_per_token(kept: Iterable[KeptTensor]) -> int:
    """Bytes that each token takes."""
    parts = {"token": 1, "block": BLOCK}
    return sum(-(-tensor.nbytes // parts[tensor.per]) for tensor in kept if tensor.per in parts)


def bytes_per_sequence(kept: Iterable[KeptTensor]) -> int:
    """Bytes that a sequence takes, however long it is."""
    return sum(tensor.nbytes for tensor in kept if tensor.per == "sequence")


def types_of(kept: Iterable[KeptTensor]) -> str:
    """The types of the tensors, such as ``float16`` or ``uint8, uint16``."""
    return ", ".join(sorted({tensor.type for tensor in kept}))
