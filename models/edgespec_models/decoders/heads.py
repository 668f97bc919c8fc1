"""Decoders that draft from states of their target."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.decoders import transformer
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import attention_of, dense, through_layers


def _eagle3(b: Backend, f: ModelConfig) -> None:
    """EAGLE-3 (arXiv 2503.01840). Its product of embedding and state side by side is a sum of two."""
    features, states = b.features(len(f.feature_layers) * f.feature_width), b.states(f.hidden_size)
    embedding = b.embed(f.vocab_size, f.hidden_size)
    known = b.norm(features, "fuse_norm") if f.normed_features else features
    x = b.joined(b.linear(known, "fuse", f.hidden_size), states)
    if f.normed_residual:
        x = b.normalized(x, "layers.0.attn_norm")
    with b.layer(0, x):
        h = x if f.normed_residual else b.norm(x, "attn_norm")
        facts = attention_of(f, 0)
        embedded = {f"embed_{name}": rows for name, rows in facts.products.items()}
        qkv = b.add(
            b.linear(b.norm(embedding, "embed_norm"), "embed_qkv", embedded, part="attention"),
            b.linear(h, "qkv", facts.products, biases=None, part="attention"),
        )
        y = b.linear(b.attention(qkv, facts), "o", f.hidden_size, part="attention")
        x = b.add(x, y, "middle")
        x = b.add(x, dense(b, f, 0, b.norm(x, "mlp_norm")), "residual")
    x = b.wanted(x)
    b.write(b.logits(x, f.vocab_size))
    b.write_states(x, f.hidden_size)


def _mtp(b: Backend, f: ModelConfig) -> None:
    """An MTP layer (arXiv 2412.19437); its product of embedding and state side by side is a sum of two.

    The state of the token before is normalized as for an LM head: the target's stream by the target's norm,
    the layer's own by its own.
    """
    features, states = b.features(f.feature_width), b.states(f.hidden_size)
    normed = b.normalized(features, "target_norm"), b.normalized(states, "final_norm")
    embedding = b.norm(b.embed(f.vocab_size, f.hidden_size, f.embedding_scale), "embed_norm")
    known = b.norm(b.joined(*normed), "fuse_norm")
    x = b.add(
        b.linear(embedding, "embed_fuse", f.hidden_size),
        b.linear(known, "fuse", f.hidden_size),
    )
    x = b.wanted(through_layers(b, f, x))
    b.write(b.logits(x, f.vocab_size, f.logit_cap))
    b.write_states(x, f.hidden_size)


def _assistant(b: Backend, f: ModelConfig) -> None:
    """One of Gemma 4's assistants, whose layers have queries alone.

    Its product of embedding and state side by side is a sum of two, as in an MTP layer. The target's stream
    is normalized as for the target's LM head; the states that it writes are as such a one.
    """
    width, assistant = f.feature_width, f.assistant
    assert assistant is not None  # which facts of this architecture have
    features, states = b.features(width), b.states(width)
    known = b.joined(b.normalized(features, "target_norm"), states)
    embedding = b.embed(f.vocab_size, width, f.embedding_scale)
    x = b.add(b.linear(embedding, "embed_fuse", f.hidden_size), b.linear(known, "fuse", f.hidden_size))
    x = b.wanted(through_layers(b, f, x))
    if assistant.clusters:
        b.write(b.clusters(x, f.vocab_size, assistant.clusters, assistant.clusters_read))
    else:
        b.write(b.logits(x, f.vocab_size, f.logit_cap))
    b.write_states(b.linear(b.norm(x, "final_norm"), "next_state", width), width)


def _dflash(b: Backend, f: ModelConfig) -> None:
    """DFlash (arXiv 2602.06036): its layers see what features of the target give them, and a block.

    With a chain (DSpark, arXiv 2607.05147) a bias that follows from the token before changes the logits.
    """
    block = f.block
    assert block is not None  # which facts of this architecture have
    features = b.features(len(f.feature_layers) * f.feature_width)
    known = b.post_norm(b.linear(features, "fuse", f.hidden_size), "fuse_norm")
    x = b.embed(f.vocab_size, f.hidden_size, f.embedding_scale)
    x = b.wanted(through_layers(b, f, x, known))
    logits = b.logits(x, f.vocab_size, f.logit_cap)
    b.write(logits, b.chain(logits, x, f.vocab_size, block) if block.rank else None)


_HEADS: Final[Mapping[str, Callable[[Backend, ModelConfig], None]]] = MappingProxyType(
    {"eagle3": _eagle3, "mtp": _mtp, "assistant": _assistant, "dflash": _dflash}
)


def decode(b: Backend, f: ModelConfig) -> None:
    """A pass of the decoder with the facts ``f``, of a head or of any other, in the medium of ``b``."""
    _HEADS.get(f.architecture, transformer.decode)(b, f)
