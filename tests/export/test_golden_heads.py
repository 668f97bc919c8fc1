"""Tiny EAGLE-3 heads: the files that tests write are those of the references, and the references agree."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgespec import RequestOptions, load, plan
from edgespec.drafting.heads import HeadReader
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows
from tests.kit.drafters import draft_eagerly, read, step
from tests.kit.golden_heads import (
    CASES,
    HEADS,
    HIDDEN,
    compared,
    digest,
    golden,
    head_gguf,
    head_tokens,
    head_weights,
    target_gguf,
    target_weights,
    write_head,
    write_target,
)
from tests.kit.heads import F32, Reference
from tests.kit.native import tiny_native
from tests.kit.several import Driven
from tests.kit.toy import tiny_bundle


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_references_were_made_of(case: str) -> None:
    assert [digest(target_gguf(case)), digest(head_gguf(case))] == golden(case)["digests"].tolist()


def test_files_in_q8_0_hold_the_weights_of_the_float32_ones() -> None:
    names = {"fc": "fc", "lm_head": "output", "midlayer.mlp.down_proj": "blk.0.ffn_down"}
    for name, tensor in names.items():
        np.testing.assert_array_equal(
            head_gguf("llama").values(f"{tensor}.weight"), head_weights()[f"{name}.weight"]
        )


def head_drafts(case: str, features: F32, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """What a head drafts behind a text, and how probable it finds each, by the paper's section 3.1.

    Args:
        case: which head.
        features: the target's features of all tokens but the last, [n - 1, 3 * HIDDEN].
        tokens: the text, n tokens.
        count: how many to draft.
    """
    weights = {name.split(".")[-2]: x for name, x in head_weights().items()}
    embedding = target_weights(case)["model.embed_tokens.weight"]
    head = Reference(weights, embedding, (HEADS, 1), theta=10000.0, normed_residual=CASES[case][1])
    drafted: list[int] = []
    probabilities: list[float] = []
    states = np.empty((0, HIDDEN), np.float32)
    while len(drafted) < count:
        state, logits = head([*tokens[1:], *drafted], features, states)
        shares = np.exp(logits[-1] - logits[-1].max())
        drafted.append(int(head_tokens()[shares.argmax()]))
        probabilities.append(float(1 / shares.sum()))
        states = np.concatenate([states, state[-1:]])  # stands for features behind the text
    return drafted, probabilities


@pytest.mark.parametrize("case", CASES)
def test_a_head_in_numpy_drafts_what_the_references_say(case: str) -> None:
    stored = golden(case)
    features = stored["features"].astype(np.float32).reshape(-1, 3 * HIDDEN)
    prompt = [token for token in stored["prompts"][0].tolist() if token >= 0]
    text = prompt + stored["tokens"][0].tolist()
    ends = range(len(prompt), len(features) + 2)  # a head needs no features of the last token
    drafts = [head_drafts(case, features[: end - 1], text[:end], 4) for end in ends]
    probabilities = np.array([found for _, found in drafts])
    same, of = compared(
        np.array([found for found, _ in drafts]),
        stored["drafts"][0, : len(ends)],
        stored["margins"][0, : len(ends)],
        0.01,  # features were stored in float16
    )
    assert same == of > 2 * len(ends)
    np.testing.assert_allclose(probabilities[:, 0], stored["probabilities"][0, : len(ends), 0], atol=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_and_the_paper_agree(case: str) -> None:
    stored = golden(case)
    clearer = np.minimum(stored["margins"], stored["llama_margins"])
    same, of = compared(stored["drafts"], stored["llama_drafts"], clearer, 0.05)
    assert same == of > stored["drafts"].size * 3 // 4


@pytest.fixture(scope="module", params=[(case, form) for case in CASES for form in ("gguf", "folder")])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A case, its target and its head, whose files hold the same weights in both forms."""
    (case, form), folder = request.param, tmp_path_factory.mktemp("pair")
    target, head = folder / "target", folder / "head"
    if form == "gguf":
        target_gguf(case).write(target.with_suffix(".gguf"))
        head_gguf(case).write(head.with_suffix(".gguf"))
        target, head = target.with_suffix(".gguf"), head.with_suffix(".gguf")
    else:
        write_target(target, case)
        write_head(head, case)
    export_model(target, folder / "t")
    quantization = None if form == "gguf" else Quantization(bits=8)
    options = ExportOptions(role="drafter", target=target, quantization=quantization)
    export_model(head, folder / "h", options=options)
    return case, folder / "t", folder / "h"


def test_drafts_are_those_of_the_paper_and_of_llama_cpp(pair: tuple[str, Path, Path]) -> None:
    """Activations of eight bits move near-ties; where logits lie 15 % of their spread apart none moves."""
    case, target, head = pair
    bundle, stored = Bundle(head), golden(case)
    reads = open_cpu(Bundle(target), read_layers=bundle.config.feature_layers)
    drafts, session = np.full_like(stored["drafts"], -1), open_cpu(bundle)
    with closing(reads), closing(session):
        session.reserve(session.model.longest)
        for index, (prompt, tokens) in enumerate(zip(stored["prompts"], stored["tokens"], strict=True)):
            text = [token for token in prompt.tolist() if token >= 0]
            reads.rewind(0)
            reader = HeadReader(session, CostCurve({1: 1.0}), len(text) - 1)
            reader.add_features(cast(Any, reads.predict(text[:-1]).hidden), 1)
            for place, token in enumerate(tokens.tolist()):
                guesses = [read(reader, text)]
                while len(guesses) < drafts.shape[-1]:
                    guesses.append(step(reader, guesses[-1].following))
                drafts[index, place] = [guess.following for guess in guesses]
                reader.add_features(cast(Any, reads.predict(text[-1:]).hidden), 1)
                text.append(token)
    for other, margins in (("drafts", "margins"), ("llama_drafts", "llama_margins")):
        same, of = compared(drafts, stored[other], stored[margins], 0.15)
        assert same == of > drafts.size // 2


def test_a_target_that_gives_out_features_has_the_same_bits(pair: tuple[str, Path, Path]) -> None:
    _, target, _ = pair
    plain, reads = open_cpu(Bundle(target)), open_cpu(Bundle(target), read_layers=(2, 4))
    with closing(plain), closing(reads):
        for tokens in ([3, 4, 5, 6], [7]):
            plain_rows, same = plain.predict(tokens), reads.predict(tokens)
            np.testing.assert_array_equal(plain_rows.logits, same.logits)
            assert plain_rows.hidden is None and cast(Any, same.hidden).shape == (len(tokens), 2 * HIDDEN)


def test_states_of_one_text_and_features_of_another_share_a_pass(pair: tuple[str, Path, Path]) -> None:
    """In whatever order they are asked for; each row has the bits that it has alone."""
    session = open_cpu(Bundle(pair[2]))
    with closing(session), closing(session.model.session()) as other:
        rng = np.random.default_rng(0)
        features, state = rng.normal(size=(5, 3 * HIDDEN)), rng.normal(size=(1, HIDDEN))
        parts = [
            Rows(session, [7], 1, states=state.astype(np.float32)),
            Rows(other, [3, 4, 5, 6, 7], 2, features=features.astype(np.float32)),
        ]
        apart = [session.model.predict_together([rows])[0] for rows in parts]
        wanted = [(predictions.logits.copy(), cast(Any, predictions.hidden).copy()) for predictions in apart]
        session.rewind(0)
        other.rewind(0)
        for predictions, (logits, hidden) in zip(session.model.predict_together(parts), wanted, strict=True):
            np.testing.assert_array_equal(predictions.logits, logits)
            np.testing.assert_array_equal(predictions.hidden, hidden)


def test_answers_with_a_head_are_those_without(pair: tuple[str, Path, Path]) -> None:
    """Several at once."""
    _, target, head = pair
    ways: list[RequestOptions] = [{"max_new_tokens": 40}, {"temperature": 0.9, "seed": 5}]
    prompts = "what is", "a longer prompt of several words", "x"
    with load(target, head) as model, load(target, None) as plain:
        draft_eagerly(model)
        driven = Driven(model)
        for options in ways:
            streams = [driven.queue(model.stream(prompt, **options)) for prompt in prompts]
            driven.run()
            for prompt, stream in zip(prompts, streams, strict=True):
                assert stream.result.tokens == plain.generate(prompt, **options).tokens
                assert stream.result.stats.by_source["model"].drafted > 5


def test_a_head_is_made_at_first_use_and_opened_later(tmp_path: Path, home: Path) -> None:
    target, head = write_target(tmp_path / "t", "qwen3"), write_head(tmp_path / "h", "qwen3")
    planned = cast(Any, plan(target, head).drafter)
    for _ in range(2):
        with load(target, head) as model:
            made = cast(Bundle, model.drafter)
        assert made.config.is_head and planned.weights_bytes == made.manifest.bytes_per_pass
        assert len(list((home.parent / "bundles").glob("h-*-drafter-*"))) == 1
    again = plan(target, head)
    assert again.target.state == cast(Any, again.drafter).state == "here"
    with pytest.raises(RequestError, match=r"export .* --target SOURCE -o DIR"):
        load(model.target.path, head)
    with pytest.raises(RequestError, match=r"is a head for a target of .* use the head of this"):
        load(tiny_native(tmp_path / "other").path, made.path)
    with pytest.raises(RequestError, match="has no such outputs"):
        load(tiny_bundle(tmp_path / "portable").bundle.path, made.path)
