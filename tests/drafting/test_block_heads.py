"""Heads that draft blocks (DFlash, arXiv 2602.06036; DSpark): against the formula, from file to drafts."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import RequestOptions
from edgespec.decoding.draft import Draft, Passed, Round
from edgespec.drafting.blocks import BlockDrafter
from edgespec.drafting.model import Calibration
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.rates import Rate
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, UnsupportedModelError
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows, Session
from tests.kit import block_heads as blocks
from tests.kit.block_heads import MASK, READS, Reference
from tests.kit.drafters import FREE, QUICK, check_drafts
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted
from tests.kit.heads import EIGHT, drafts_for
from tests.kit.hf import VOCAB, config_of, weights, write_directory, write_with_tokenizer
from tests.kit.mtp import streams_of

NEAR = 0.03
"""Of the deviation: activations in 8 bits. What differs in kind is beyond."""
CLEAR = 0.15
"""Deviations that a logit is above the second where rounding moves none."""
LAYERS = tuple(layer + 1 for layer in READS)


def text_of(seed: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, tokens)]


Made = tuple[Path, Path, Bundle, Bundle]
"""The target's file, the head's, and their bundles."""


KINDS: dict[str, dict[str, bool]] = {"dflash": {}, "dflash 2": {"second": True}, "dspark": {"chained": True}}


@pytest.fixture(scope="module", params=[*KINDS.values()], ids=[*KINDS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("blocks")
    target = blocks.target_gguf().write(folder / "m.gguf")
    head = blocks.gguf(**request.param).write(folder / "head.gguf")
    export_model(target, folder / "target")
    export_model(head, folder / "head", options=drafts_for(target))
    return target, head, Bundle(folder / "target"), Bundle(folder / "head", verify_digests=True)


def kind_of(head: Bundle) -> dict[str, bool]:
    block = head.config.block
    assert block is not None
    return KINDS[
        "dflash 2" if head.config.architecture == "dflash2" else "dspark" if block.rank else "dflash"
    ]


def reference_of(head: Bundle) -> Reference:
    kind, target = kind_of(head), blocks.target_tensors(blocks.target_config())
    return Reference(blocks.config(), blocks.tensors(**kind), target, anchored=kind.get("chained", False))


def distance(found: Any, expected: Any) -> float:
    """In deviations of what is expected."""
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())


def test_a_block_computes_the_formula(made: Made) -> None:
    """Behind tokens that were read together or in pieces; of the last block nothing stays."""
    *_, target, head = made
    streams, session, text = open_cpu(target, read_layers=LAYERS), open_cpu(head), text_of(0, 24)
    with closing(streams), closing(session):
        session.reserve(80)
        features, right = streams_of(streams, text), reference_of(head)
        for held, known, masks in ((0, 7, 3), (7, 12, 1), (12, 20, 5)):
            session.rewind(held)
            block = [text[known], *[MASK] * masks]
            rows = Rows(
                session, [*text[held:known], *block], 1 + masks, features[held:known], injected=known - held
            )
            (prediction,) = session.model.predict_together([rows])
            near = distance(prediction.logits, right(features[:known], block)[1])
            assert near < NEAR
            for wrong in (replace(right, causal=True), replace(right, shifted=1)):
                assert distance(prediction.logits, wrong(features[:known], block)[1]) > 2 * near


def test_a_block_sees_no_other_block_of_its_pass(made: Made) -> None:
    *_, target, head = made
    text = text_of(4, 12)
    with closing(open_cpu(target, read_layers=LAYERS)) as streams, closing(open_cpu(head)) as session:
        features, second = streams_of(streams, text), session.model.session()
        blocks_of = [[text[known], *[MASK] * (known - 7)] for known in (8, 10)]
        rows = [
            Rows(
                one,
                [*text[: 12 - len(block)], *block],
                len(block),
                features[: 12 - len(block)],
                injected=12 - len(block),
            )
            for one, block in zip((session, second), blocks_of, strict=True)
        ]
        together = [
            one.logits.copy() for one in session.model.predict_together(rows)
        ]  # the next pass writes there
        for one, row, found in zip((session, second), rows, together, strict=True):
            one.rewind(0)
            (alone,) = session.model.predict_together([row])
            assert np.array_equal(found, alone.logits)


def drafter_of(session: Session, length: int) -> BlockDrafter:
    """One for which nothing costs anything, behind a prompt of so many tokens."""
    block = session.model.config.block
    assert block is not None
    rates = [Rate.usual(0.9, 20.0) for _ in range(block.longest)]
    return BlockDrafter(session, QUICK, length, calibration=Calibration(), rates=rates)


def drafted(drafter: BlockDrafter, tokens: Sequence[int], limit: int) -> Draft:
    rows = drafter.begin(tokens, limit, Pricing(FREE).at())
    assert isinstance(rows, Rows)
    (predictions,) = rows.session.model.predict_together([rows])
    return drafter.take(predictions, Passed(1, 1e-6, 1e-6))


def agreed(target: Bundle, head: Bundle, reference: Reference) -> int:
    """How many drafted tokens agree with the formula, all but those that rounding may change.

    They are behind each token of a text, as the target reads it, and behind tokens that a grammar forces.
    """
    streams, session, text, compared = open_cpu(target, read_layers=LAYERS), open_cpu(head), text_of(2, 40), 0
    with closing(streams), closing(session):
        session.reserve(session.model.longest)
        whole = streams_of(streams, text)
        drafter = drafter_of(session, 7)
        drafter.observe(Round((text[7],), features=whole[:7]))
        for length in range(8, 30):
            forced, limit = length % 5 // 4, length % 3 + 2
            guesses = drafted(drafter, text[: length + forced], limit).tokens
            wanted, clear, _ = reference.draft(whole[: length - 1], text[length - 1 : length + forced], limit)
            for guess, token, margin in zip(guesses, wanted, clear, strict=False):
                if margin < CLEAR:
                    break
                assert guess == token
                compared += 1
            drafter.observe(Round((text[length],), features=whole[length - 1 : length]))
    return compared


def test_drafts_are_those_of_the_formula(made: Made) -> None:
    *_, target, head = made
    assert agreed(target, head, reference_of(head)) > 12


def test_an_lm_head_is_trimmed_to_what_is_written(tmp_path: Path, made: Made) -> None:
    source, head, target, whole = made
    export_model(head, tmp_path / "head", options=drafts_for(source, trim=290))
    trimmed = Bundle(tmp_path / "head")
    assert trimmed.head_tokens is not None and len(trimmed.head_tokens) == 290
    assert agreed(target, trimmed, replace(reference_of(whole), kept=trimmed.head_tokens.tolist())) > 12


def test_confidences_are_those_of_the_head(made: Made) -> None:
    *_, target, head = made
    reference, text = reference_of(head), text_of(3, 12)
    with closing(open_cpu(target, read_layers=LAYERS)) as streams, closing(open_cpu(head)) as session:
        features = streams_of(streams, text)
        masks = [MASK] * (3 if reference.anchored else 4)
        rows = Rows(session, [*text, *masks], 4, features[:11], injected=11)
        (prediction,) = session.model.predict_together([rows])
        sure = reference.draft(features[:11], text[11:], 4)[2]
        probabilities = [prediction.probability(row) for row in range(4)]
        assert np.allclose(probabilities, sure, atol=0.05) if sure else max(probabilities) < 0.2


def test_directories_are_the_same_heads(tmp_path: Path, made: Made) -> None:
    *_, target, head = made
    whole, kind = blocks.write_target(tmp_path / "m"), kind_of(head)
    facts, values = blocks.config(**kind), blocks.tensors(**kind)
    source = write_directory(tmp_path / "head", facts, values)
    export_model(source, tmp_path / "out", options=drafts_for(whole, quantization=EIGHT))
    made_of = Bundle(tmp_path / "out")
    assert made_of.config.block == head.config.block
    assert agreed(target, made_of, reference_of(head)) > 12


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "directory"])
def test_heads_of_lfm2_rotate_neighbours(tmp_path: Path, kind: str) -> None:
    """They draft nine tokens for a target with convolutions; GGUF files have their rows in another order."""
    facts, values = blocks.config_for_lfm2(), blocks.tensors(chained=True)
    halves, of_target = blocks.in_halves(values, facts["head_dim"]), weights(blocks.LFM2, 1)
    if kind == "directory":
        target = write_with_tokenizer(tmp_path / "m", blocks.LFM2, of_target)
        source = write_directory(tmp_path / "head", facts, values)
    else:
        target = converted("lfm2", blocks.LFM2, of_target, kind, tokens=VOCAB).write(tmp_path / "m.gguf")
        head = blocks.gguf(kind, chained=True, values=halves)
        head.metadata["dflash.block_size"] = 9
        source = head.write(tmp_path / "head.gguf")
    export_model(target, tmp_path / "target", options=ExportOptions(quantization=EIGHT))
    export_model(source, tmp_path / "out", options=drafts_for(target, quantization=EIGHT))
    made, reading = Bundle(tmp_path / "out"), Bundle(tmp_path / "target")
    assert made.config.block is not None and made.config.block.longest == 9 and made.config.block.confident
    reference = Reference(blocks.config(), halves, of_target, anchored=True)
    assert agreed(reading, made, reference) > 20
    check_drafts(reading.path, made.path, {"max_new_tokens": 30})


def test_muse_glimmers_assistant_has_other_names(tmp_path: Path) -> None:
    """Its target normalizes embeddings for itself alone, and its windows need no switch."""
    facts = {**config_of("muse_glimmer"), "num_hidden_layers": blocks.LAYERS, "eos_token_id": 2}
    del facts["layer_types"], facts["layer_rope_theta"]
    of_target, head = weights(facts, 1), blocks.config()
    target = write_with_tokenizer(tmp_path / "m", facts, of_target)
    head |= head.pop("dflash_config") | {"model_type": "muse_glimmer_assistant"}
    head |= {"architectures": ["MuseGlimmerAssistantModel"], "layer_types": ["sliding_attention"] * 2}
    head["sliding_window"] = 60
    del head["vocab_size"], head["num_target_layers"]
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    values = {
        next((name.replace(*pair) for pair in names.items() if name.startswith(pair[0])), name): tensor
        for name, tensor in blocks.tensors().items()
    }
    source = write_directory(tmp_path / "head", head, values)
    export_model(target, tmp_path / "target", options=ExportOptions(quantization=EIGHT))
    export_model(source, tmp_path / "out", options=drafts_for(target, quantization=EIGHT))
    reading, made = Bundle(tmp_path / "target"), Bundle(tmp_path / "out")
    assert made.config.attended(100) == 60
    assert agreed(reading, made, Reference(blocks.config(), blocks.tensors(), of_target)) > 12
    check_drafts(reading.path, made.path, {"max_new_tokens": 30})


@pytest.mark.parametrize("chained", [False, True])
def test_heads_of_the_speculators_package_draft_some_tokens(tmp_path: Path, chained: bool) -> None:
    """They have an LM head of their own for these, name what enters layers, and know the first token."""
    target, kept = blocks.write_target(tmp_path / "m"), np.arange(3, VOCAB, 2)
    facts = blocks.speculators(len(kept), chained=chained)
    values: dict[str, Any] = blocks.tensors(chained=chained)
    of_target = blocks.target_tensors(blocks.target_config())
    values["lm_head.weight"] = of_target["lm_head.weight"][kept]
    if chained:
        values["markov_head.markov_w2.weight"] = values["markov_head.markov_w2.weight"][kept]
        del values["confidence_head.proj.bias"]
    rows = {"d2t": kept - np.arange(len(kept)), "t2d": np.isin(np.arange(VOCAB), kept)}
    source = write_directory(tmp_path / "head", facts, values | rows)
    export_model(target, tmp_path / "target", options=ExportOptions(quantization=EIGHT))
    export_model(source, tmp_path / "out", options=drafts_for(target, quantization=EIGHT))
    reference = Reference(blocks.config(), blocks.tensors(chained=chained), of_target, kept=kept.tolist())
    assert agreed(Bundle(tmp_path / "target"), Bundle(tmp_path / "out"), reference) > 25


def test_a_causal_block_with_windows(tmp_path: Path) -> None:
    """Rows see no masks behind them; a window that all fits in changes nothing."""
    target = blocks.target_gguf().write(tmp_path / "m.gguf")
    head = blocks.gguf()
    head.metadata |= {"dflash.attention.causal": True, "dflash.attention.sliding_window": 60}
    head.metadata["dflash.attention.sliding_window_pattern"] = [True, False]
    export_model(target, tmp_path / "target")
    export_model(head.write(tmp_path / "h.gguf"), tmp_path / "head", options=drafts_for(target))
    made = Bundle(tmp_path / "head")
    assert agreed(Bundle(tmp_path / "target"), made, replace(reference_of(made), causal=True)) > 8


SLIDING, FULL = "sliding_attention", "full_attention"
OF_SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any], bool | tuple[int, ...]]] = {
    "windows that see no masks behind": ({"layer_types": [SLIDING] * 2}, {}, True),
    "wider than the context": ({"layer_types": [SLIDING] * 2, "sliding_window": 500}, {}, True),
    "in one layer": ({"layer_types": [SLIDING, FULL]}, {}, (0,)),
    "windows that see all": ({"layer_types": [SLIDING] * 2}, {"sliding_window_non_causal": True}, False),
    "no windows": ({"layer_types": [FULL] * 2}, {}, False),
    "the target's rotations": ({"partial_rotary_factor": 0.25, "layer_types": [FULL] * 2}, {}, False),
    "likewise": (
        {"layer_types": [FULL] * 2, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {},
        False,
    ),
}


@pytest.mark.parametrize(("layer", "more", "causal"), OF_SPECULATORS.values(), ids=OF_SPECULATORS)
def test_blocks_see_and_rotate_as_the_heads_own_class_does(
    tmp_path: Path, layer: dict[str, Any], more: dict[str, Any], causal: bool | tuple[int, ...]
) -> None:
    """Layers are causal where they have a window, and a Qwen3 rotates whole heads whatever is stated."""
    target, facts = blocks.write_target(tmp_path / "m"), blocks.speculators(VOCAB, chained=True)
    facts["transformer_layer_config"] |= {"sliding_window": 60, "use_sliding_window": True, **layer}
    facts |= {"sliding_window_non_causal": False, **more}
    source = write_directory(tmp_path / "head", facts, blocks.tensors(chained=True))
    export_model(target, tmp_path / "target", options=ExportOptions(quantization=EIGHT))
    export_model(source, tmp_path / "out", options=drafts_for(target, quantization=EIGHT))
    made = Bundle(tmp_path / "out")
    reference = replace(reference_of(made), causal=causal, anchored=False)
    assert agreed(Bundle(tmp_path / "target"), made, reference) > 20


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 40}, {"max_new_tokens": 40, "temperature": 0.9, "seed": 5}]
)
def test_answers_are_those_without(made: Made, options: RequestOptions) -> None:
    target, head = (bundle.path for bundle in made[2:])
    check_drafts(target, head, options)


# ---- Refused -----------------------------------------------------------------------------------------------


def _says(**keys: object) -> Callable[[TinyGGUF], object]:
    return lambda model: model.metadata.update({f"dflash.{key}": value for key, value in keys.items()})


def _without(name: str) -> Callable[[TinyGGUF], object]:
    return lambda model: model.tensors.pop(f"{name}.weight")


def _as(name: str, shape: tuple[int, ...]) -> Callable[[TinyGGUF], object]:
    return lambda model: model.tensors.update({f"{name}.weight": ("F32", np.ones(shape, np.float32))})


def _masks(token: int) -> Callable[[TinyGGUF], object]:
    return lambda model: model.metadata.update({"tokenizer.ggml.mask_token_id": token})


WRONG: dict[str, tuple[Callable[[TinyGGUF], object], type[EdgespecError], str]] = {
    "layers there are not": (_says(target_layers=[1, 3, 9]), RequestError, r"9\].*m\.gguf has 0 to 4"),
    "too few layers": (_says(target_layers=[1, 3]), ModelFileError, "fc.weight.*Or give the target"),
    "no layers": (lambda m: m.metadata.pop("dflash.target_layers"), RequestError, "layers None"),
    "a mask beyond": (
        _masks(VOCAB),
        UnsupportedModelError,
        "is token 320; allowed: 0 to 319",
    ),
    "no mask": (lambda m: m.metadata.pop("tokenizer.ggml.mask_token_id"), ModelFileError, "mask_token_id"),
    "a block of one": (_says(block_size=1), UnsupportedModelError, "size is 1"),
    "a selector without tensors": (
        _says(selector_rank=32, selector_top_k=4, conv_kernel_size=2, conv_group_size=16),
        ModelFileError,
        "lacks a tensor for chain_",
    ),
    "a selector without its size": (_says(selector_rank=32), ModelFileError, "conv_kernel_size"),
    "another gate": (_says(hidden_activation="gelu"), UnsupportedModelError, "hidden_activation is 'gelu'"),
    "no fusion": (_without("fc"), ModelFileError, r"lacks a tensor for fuse \(dflash\)"),
    "no norm of keys": (_without("blk.1.attn_k_norm"), ModelFileError, r"layers\.1\.k_norm"),
    "a wide norm": (_as("enc.output_norm", (192,)), ModelFileError, r"output_norm.*\(192,\).*\(64,\)"),
    "a strange tensor": (_as("blk.0.attn_sinks", (4,)), UnsupportedModelError, "sinks"),
    "a chain cut off": (_as("markov_w1", (VOCAB, 32)), ModelFileError, "lacks a tensor for chain_out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_heads_that_are_cut_off_or_others_are_named(tmp_path: Path, name: str) -> None:
    change, kind, words = WRONG[name]
    model, target = blocks.gguf(), blocks.target_gguf().write(tmp_path / "m.gguf")
    change(model)
    head = model.write(tmp_path / "h.gguf")
    with pytest.raises(kind, match=words):
        export_model(head, tmp_path / "out", options=drafts_for(target))


FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "another target": ({"num_target_layers": 36}, "reads a target of 36 layers; m has 5"),
    "another vocabulary": ({"vocab_size": 400}, "vocab_size is 400, of m it is 320"),
    "another width": ({"hidden_size": 128}, "feature_width 64"),
    "another bias": ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
    "groups that do not divide": (
        {
            "dflash_config": {
                "mask_token_id": 9,
                "target_layer_ids": [0, 2, 3],
                **blocks.SELECTOR,
                "conv_group_size": 24,
            }
        },
        "conv_group is 24; allowed: a divisor of 64",
    ),
    "logits times a number": (
        {**blocks.config(second=True), "output_multiplier": 0.5},
        "output_multiplier is 0.5",
    ),
    "a mask beyond": ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 2, 3]}}, "token 999"),
}


@pytest.mark.parametrize("name", FACTS)
def test_directories_of_others_are_named(tmp_path: Path, name: str) -> None:
    change, words = FACTS[name]
    target = blocks.write_target(tmp_path / "m")
    head = write_directory(tmp_path / "h", {**blocks.config(), **change}, blocks.tensors())
    with pytest.raises(EdgespecError, match=words):
        export_model(head, tmp_path / "out", options=drafts_for(target))


def test_a_head_has_its_target(tmp_path: Path, made: Made) -> None:
    source, head, target, bundle = made
    with pytest.raises(RequestError, match="is a head, which drafts for one target"):
        export_model(head, tmp_path / "out")
    with edgespec.load(source, head) as model:  # and is made for the target that it is given with
        assert model.drafter is not None and model.drafter.config == bundle.config
    file = blocks.target_gguf()
    file.metadata["qwen3.block_count"] = 2
    others = tuple(f"blk.{layer}." for layer in (2, 3, 4))
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(others)}
    export_model(file.write(tmp_path / "other.gguf"), tmp_path / "other")
    with pytest.raises(RequestError, match=r"and 4 layers or more; other has 320, 64 and 2; use the head"):
        edgespec.load(tmp_path / "other", bundle.path)
    assert target.config.block is None
