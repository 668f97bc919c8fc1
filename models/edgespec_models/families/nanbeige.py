"""Nanbeige 4.2: a Llama whose layers run several times, each time with keys and values of their own."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec_models.decoders.config import Layers
from edgespec_models.decoders.operations import Backend
from edgespec_models.decoders.transformer import Transformer, in_layer
from edgespec_models.families.family import Family
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import counted, layer_count
from edgespec_models.files.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Nanbeige(Transformer):
    """``num_layers`` counts each run of the ``stored_layers``; the last norm may stand between their runs."""

    stored_layers: Layers
    normed_between: bool = True

    def through_layers(self, b: Backend, x: Any) -> Any:
        for index in range(self.num_layers):
            if index and index % self.stored_layers == 0 and self.normed_between:
                x = b.normalized(x, "final_norm")
            x = in_layer(b, index, x, partial(self.layer, b, index))
        return x

    def layer(self, b: Backend, index: int, x: Any) -> Any:
        b.reuse_layer(index % self.stored_layers)
        return super().layer(b, index, x)


def _read(facts: Facts, family: Family) -> Transformer:
    stored = layer_count(facts)
    return trunk(
        facts,
        family,
        num_layers=counted(facts, "layers in all runs", stored * facts.integer("num_loops")),
        stored_layers=stored,
        normed_between=not facts.boolean("skip_loop_final_norm", default=False),
    )


NANBEIGE = Family(
    name="nanbeige",
    hub=("nanbeige",),
    gguf="nanbeige",
    theta=5e4,
    neighbours=True,
    decoder=Nanbeige,
    defaults={"rms_norm_eps": 1e-5, "num_loops": 2},
    fixed={
        "enable_double_loop_split": False,
        "loop_share_kv": False,
        "enable_hyper_connection": False,
        "enable_mhc": False,
        "enable_depth_attention": False,
        "loop_loss_weights": [],
    },
    unstated={"num_loops": 1},
    read=_read,
)
