"""Names of a decoder's projections in its graph."""

__all__ = ["module_path"]


def module_path(linear: str) -> str:
    """A projection's name in the graph: ``layers.3.qkv`` of a plan is ``layers.3.attention.qkv`` there."""
    if linear == "lm_head":
        return linear
    layers, index, name = linear.split(".")
    return f"{layers}.{index}.{'attention' if name in ('qkv', 'o') else 'mlp'}.{name}"
