"""Gemma 4's assistants: against transformers, from file to drafts, several requests, and refused by name."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import RequestOptions, plan
from edgespec.cli import app
from edgespec.drafting.heads import AssistantReader
from edgespec.loading import drafters
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.families import read_config
from edgespec_models.families.gemma4_assistant import Gemma4Assistant
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows, Session
from tests.kit import assistants as kit
from tests.kit.drafters import check_acceptance, check_drafts, read, step
from tests.kit.gguf_cases import gguf_of
from tests.kit.heads import drafts_for

GOLDEN = Path(__file__).parents[1] / "golden_hf/assistants.npz"
NEAR = 0.06
"""Of the deviation, from transformers in float32: weights and activations have 8 bits, keys and values 16."""
EIGHT = Quantization(bits=8)
PAIRS = [("clustered", "target"), ("whole", "target"), ("file", "file target"), ("mixed", "file target")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories and files of target and assistant, with clusters and without, and what is made of them."""
    folder = tmp_path_factory.mktemp("assistants")
    found = {"target source": kit.write_target(folder / "t")}
    found["clustered source"] = kit.write(folder / "a-it-assistant", kit.config())
    found["whole source"] = kit.write(folder / "whole", kit.config(clustered=False))
    found["file target source"] = kit.target_gguf().write(folder / "t.gguf")
    found["file source"] = kit.gguf().write(folder / "a.gguf")
    for name in ("target", "file target"):
        quantization = EIGHT if name == "target" else None
        export_model(found[f"{name} source"], folder / name, options=ExportOptions(quantization=quantization))
        found[name] = folder / name
    found["mixed source"] = found["clustered source"]
    for name, of in PAIRS:
        quantization = None if name == "file" else EIGHT
        options = drafts_for(found[f"{of} source"], quantization=quantization)
        export_model(found[f"{name} source"], folder / f"of {name}", options=options)
        found[name] = folder / f"of {name}"
    return found


def opened(target: Path, head: Path) -> tuple[Session, Session]:
    config = cast(Transformer, Bundle(head).config)
    return open_cpu(Bundle(target), read_layers=config.feature_layers), open_cpu(Bundle(head))


def chain(target: Session, head: Session, text: list[int]) -> Iterator[tuple[Any, Any]]:
    """Logits and states behind a text, and behind tokens that are read as its drafts."""
    target.rewind(0)
    known: dict[str, Any] = {"features": cast(Any, target.predict(text[:-1]).hidden)[-1:]}
    for token in (text[-1], *kit.DRAFTED[:-1]):
        head.rewind(0)
        rows = Rows(head, [token], 1, target=target, **known)
        (predictions,) = head.model.predict_together([rows])
        known = {"states": cast(Any, predictions.hidden).copy()}
        yield predictions.logits[0].copy(), known["states"][0]


# ---- What it computes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "of"), PAIRS)
def test_it_computes_what_transformers_computes(made: dict[str, Path], name: str, of: str) -> None:
    """Behind texts shorter and longer than a window; only tokens of the chosen clusters have logits."""
    stored, kind = np.load(GOLDEN), "clustered" if name in ("clustered", "mixed") else "whole"
    target, head = opened(made[of], made[name])
    off: dict[str, list[float]] = {"logits": [], "states": []}
    agree = []
    with closing(target), closing(head):
        for at, text in enumerate(kit.texts()):
            for place, found in enumerate(chain(target, head, text)):
                for what, mine in zip(off, found, strict=True):
                    wanted = stored[f"{kind}_{what}"][at, place].astype(np.float32)
                    read_by_both = np.isfinite(wanted) & (mine > -1e29)
                    errors = mine[read_by_both] - wanted[read_by_both]
                    off[what].append(float(np.sqrt(np.square(errors).mean()) / np.nanstd(wanted)))
                    agree.append(read_by_both.sum() / np.isfinite(wanted).sum())
    assert max(np.median(off["logits"]), np.median(off["states"])) < NEAR
    assert max(*off["logits"], *off["states"]) < 2 * NEAR
    assert np.mean(agree) > 0.95 and min(agree) >= 0.5  # a cluster that is nearly as good may take a place


def test_a_reader_reads_what_is_drafted_at_one_position(made: dict[str, Path]) -> None:
    """The last token, tokens that a grammar forces, then drafts; and nothing before the target has read."""
    target, head = opened(made["target"], made["clustered"])
    with closing(target), closing(head):
        for text in kit.texts():
            wanted = [int(logits.argmax()) for logits, _ in chain(target, head, text)]
            reader = AssistantReader(head, CostCurve({1: 1.0}), len(text) - 1, target)
            assert not reader.room_for(text, 8)
            target.rewind(0)
            reader.add_features(cast(Any, target.predict(text[:-1]).hidden), 1)
            assert reader.room_for(text, 8)
            guesses = [read(reader, text), *(step(reader, token) for token in kit.DRAFTED[:-1])]
            assert [guess.following for guess in guesses] == wanted
            forced = read(reader, [*text, *kit.DRAFTED[:-1]])
            assert forced.following == wanted[-1] and forced.token == kit.DRAFTED[-2]
            target.rewind(len(text) - 2)
            assert not reader.room_for(text, 8)


def test_rows_of_several_have_the_bits_that_each_has_alone(made: dict[str, Path]) -> None:
    """One reads features, others states that they wrote themselves; targets' texts lie side by side."""
    first, head = opened(made["target"], made["clustered"])
    texts = [kit.texts()[at] for at in (1, 3, 4)]
    targets = [first, first.model.session(), first.model.session()]
    heads = [head, head.model.session(), head.model.session()]
    rng = np.random.default_rng(0)
    with closing(first), closing(head):
        parts = []
        for at, (target, own, text) in enumerate(zip(targets, heads, texts, strict=True)):
            features = cast(Any, target.predict(text[:-1]).hidden)[-1:]
            states = rng.normal(0, 1, features.shape).astype(np.float32)
            known: dict[str, Any] = {"features": features} if at == 1 else {"states": states}
            parts.append(Rows(own, [text[-1]], 1, target=target, **known))
        alone = []
        for rows in parts:
            (predictions,) = head.model.predict_together([rows])
            alone.append((predictions.logits.copy(), cast(Any, predictions.hidden).copy()))
            rows.session.rewind(0)
        for found, (logits, states) in zip(head.model.predict_together(parts), alone, strict=True):
            np.testing.assert_array_equal(found.logits, logits)
            np.testing.assert_array_equal(found.hidden, states)
        for session in (*targets[1:], *heads[1:]):
            session.close()


# ---- What a bundle says ------------------------------------------------------------------------------------


def test_a_bundle_of_an_assistant(made: dict[str, Path]) -> None:
    target, head = Bundle(made["target"]), Bundle(made["clustered"], verify_digests=True)
    config, manifest = cast(Transformer, head.config), head.manifest
    assert isinstance(config, Gemma4Assistant) and config.is_head and config.feature_layers == (6,)
    assert (config.windowed, config.whole) == (1, 2)
    assert (config.clusters, config.clusters_read) == (kit.CLUSTERS, kit.READ)
    assert manifest.role == "drafter" and manifest.name == "a-it-assistant" and manifest.head_rows is None
    assert manifest.kept == () and manifest.kept_bytes(96) == 0
    assert manifest.provenance["target_sha256"] == target.manifest.provenance["sha256"]
    attention = sum(2 * 32 * 4 * width for width in (16, 16, 32)) + 2 * 32 * 64 + 64 * 32
    mlp, lm_head = 3 * 3 * 32 * 64 + kit.CLUSTERS * 32, kit.READ * 16 * 32
    assert manifest.parameters_per_pass == attention + mlp + lm_head
    shown = CliRunner().invoke(app, ["inspect", str(head.path)], env={"COLUMNS": "400"})
    digest = target.manifest.provenance["sha256"]
    assert f"layers 6 of the target with SHA-256 {digest}" in shown.output and "the target's" in shown.output


def test_an_lm_head_without_clusters_is_trimmed(tmp_path: Path, made: dict[str, Path]) -> None:
    out, sources = tmp_path / "head", [str(made[name]) for name in ("file source", "file target source")]
    command = ["export", sources[0], "-o", str(out), "--target", sources[1], "--trim-vocab", "290"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "290 of 320 rows" in done.output and Bundle(out).manifest.head_rows == 290
    options = drafts_for(made["target source"], trim=290)
    with pytest.raises(RequestError, match="is a head whose LM head is not trimmed"):
        export_model(made["clustered source"], tmp_path / "no", options=options)


# ---- Requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "of"), [("clustered", "target"), ("file", "file target")])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}])
def test_answers_are_those_without(
    made: dict[str, Path], name: str, of: str, options: RequestOptions
) -> None:
    check_drafts(made[of], made[name], {**options, "max_new_tokens": 40, "stop_at_eos": False})


def test_one_that_is_mostly_right_is_mostly_accepted(tmp_path: Path) -> None:
    """It says the token that it reads again, and the target repeats tokens."""
    own, config = kit.target_tensors(), kit.config(clustered=False, hidden_size=64)
    for name, values in own.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
            own[name] = values * np.float32(2**-20)  # so what enters a layer nearly leaves it
    embedding_alone = np.concatenate([np.eye(64), np.zeros((64, 64))], axis=1).astype(np.float32)
    changed: dict[str, Any] = {"pre_projection.weight": embedding_alone}
    changed["model.embed_tokens.weight"] = own["model.embed_tokens.weight"]
    for name, values in kit.tensors(config).items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            changed[name] = 0 * values
        elif name.endswith("layer_scalar") or name == "model.norm.weight":
            changed[name] = np.ones_like(values)
    target, head = kit.write_target(tmp_path / "t", own), kit.write(tmp_path / "a", config, changed)
    export_model(target, tmp_path / "target")
    export_model(head, tmp_path / "head", options=drafts_for(target))
    check_acceptance(tmp_path / "target", tmp_path / "head")


def test_a_pulled_one_drafts_unasked(request: pytest.FixtureRequest, made: dict[str, Path]) -> None:
    """For a target by its name on the hub; its configuration passes the check of a pull."""
    target, name = "hf:google/gemma-4-E2B-it", "hf:google/gemma-4-E2B-it-assistant"
    known = [read_config(Facts(kit.config(), "c")), Bundle(made["target"]).config]
    assert known[0].architecture == known[1].architecture == "gemma4"
    for pulled in (False, True):
        if pulled:
            request.getfixturevalue("all_pulled")
        chosen, speed = drafters.recommended(known[1], 3_000_000_000, reference=target)
        assert (chosen == name) == pulled and (speed > 1.8 or not pulled)


def test_it_is_made_at_first_use(made: dict[str, Path]) -> None:
    target, head = made["target source"], made["clustered source"]
    planned = cast(Any, plan(target, head).drafter)
    with edgespec.load(target, head) as model:
        bundle = cast(Bundle, model.drafter)
    assert planned.weights_bytes == sum(
        bundle.manifest.bytes_by_class[kind] for kind in ("attention", "mlp", "lm_head")
    )
    assert planned.cache.bytes(1000) == 0
    assert cast(Any, plan(target, head).drafter).state == "here"


# ---- Refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "tensors", "words"),
    [
        ({"backbone_hidden_size": 96}, {}, "made for a model whose target width is 96; of t it is 64"),
        ({"text": {"head_dim": 32}}, {}, "whose local_head_dim is 32; of t it is 16"),
        ({"text": {"num_key_value_heads": 4}}, {}, "whose num_kv_heads is 4; of t it is 2"),
        ({"text": {"sliding_window": 5}}, {}, "whose sliding_window is 5; of t it is 6"),
        ({"text": {"vocab_size": 640}}, {}, "whose vocab_size is 640; of t it is 320"),
        ({"num_centroids": 24}, {}, "320 tokens lie in 24 clusters; allowed: clusters of a multiple of 16"),
        ({"centroid_intermediate_top_k": 21}, {}, "21 of 20 clusters of tokens are read"),
        ({}, {"masked_embedding.centroids.weight": None}, "lacks a tensor for centroids"),
        ({}, {"masked_embedding.token_ordering": None}, "token_ordering must list each of 320 tokens once"),
        ({}, {"masked_embedding.token_ordering": np.zeros(320, np.int64)}, "must list each of 320 tokens"),
        ({}, {"pre_projection.weight": np.zeros((32, 64), np.float32)}, r"shape \(32, 64\)"),
        ({}, {"model.embed_tokens.weight": None}, "has no usable token embedding"),
        ({}, {"post_projection.weight": None}, "lacks a tensor for next_state"),
        ({}, {"model.layers.0.self_attn.q_proj.weight": None}, r"lacks a tensor for layers\.0\.q"),
        ({}, {"model.other.weight": np.zeros((2, 2), np.float32)}, "no use for in an assistant, such as"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, made: dict[str, Path], facts: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    config = kit.config() | {key: value for key, value in facts.items() if key != "text"}
    config["text_config"] |= facts.get("text", {})
    folder = kit.write(tmp_path / "a", kit.config(), tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises((RequestError, ModelFileError, UnsupportedModelError), match=words):
        export_model(folder, tmp_path / "head", options=drafts_for(made["target source"]))
    assert not (tmp_path / "head").exists()


def test_other_targets_are_refused(tmp_path: Path, made: dict[str, Path]) -> None:
    for name in ("clustered source", "file source"):
        with pytest.raises(RequestError, match="drafts for one target"):
            export_model(made[name], tmp_path / "out")
        other = gguf_of("gemma3", "Q8_0").write(tmp_path / "gemma3.gguf")
        with pytest.raises(RequestError, match=r"whose architecture is 'gemma4'; of gemma3.*'gemma3'"):
            export_model(made[name], tmp_path / "head", options=drafts_for(other))
    tied = gguf_of("gemma4_tied", "Q8_0").write(tmp_path / "tied.gguf")
    export_model(tied, tmp_path / "tied")
    with pytest.raises(EdgespecError, match="use the head of this target"):
        edgespec.load(tmp_path / "tied", made["clustered"])
    file = kit.gguf()
    del file.metadata["gemma4-assistant.embedding_length_out"]
    with pytest.raises(ModelFileError, match="lacks 'embedding_length_out'"):
        export_model(
            file.write(tmp_path / "a.gguf"),
            tmp_path / "head",
            options=drafts_for(made["file target source"]),
        )


def test_a_configuration_of_an_assistant_is_whole(made: dict[str, Path]) -> None:
    config = cast(Transformer, Bundle(made["clustered"]).config)
    for change in ({"feature_layers": ()}, {"clusters_read": 0}, {"clusters": 7}, {"shared_layers": 1}):
        with pytest.raises(UnsupportedModelError, match=r"assistant|clusters"):
            replace(config, **cast(Any, change))
