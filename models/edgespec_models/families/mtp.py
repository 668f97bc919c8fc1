"""MTP layers, which predict one token more (DeepSeek-AI 2024, arXiv 2412.19437), as heads of their model.

Models that have one state its tensors' names as :attr:`~edgespec_models.families.family.Family.mtp`.
"""

from edgespec_models.bundles.config import ModelConfig
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import through_layers
from edgespec_models.families.family import Family


def _decode(b: Backend, f: ModelConfig) -> None:
    """A pass of the layer; its product of embedding and state side by side is a sum of two.

    The state of the token before is normalized as for an LM head: the target's stream by the target's norm,
    the layer's own by its own.
    """
    features, states = b.features(f.feature_width), b.states(f.hidden_size)
    normed = b.normalized(features, "target_norm"), b.normalized(states, "final_norm")
    known = b.linear(b.norm(b.joined(*normed), "fuse_norm"), "fuse", f.hidden_size)
    embedding = b.norm(b.embed(f.vocab_size, f.hidden_size, f.embedding_scale), "embed_norm")
    x = b.add(b.linear(embedding, "embed_fuse", f.hidden_size), known)
    x = b.wanted(through_layers(b, f, x))
    b.write(b.logits(x, f.vocab_size, f.logit_cap))
    b.write_states(x, f.hidden_size)


MTP = Family(name="mtp", kind="head", decode=_decode)
