"""Tiny EAGLE-3 heads: the files that tests write are those of the references, and the references agree."""

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgespec import RequestOptions, load
from edgespec.decoding.draft import alone
from edgespec.drafting.heads import HeadReader
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuSession
from tests.drafters_for_tests import FREE, QUICK
from tests.golden_heads_for_tests import (
    CASES,
    HIDDEN,
    compared,
    digest,
    golden,
    head_drafts,
    head_gguf,
    head_weights,
    target_gguf,
    write_head,
    write_target,
)
from tests.several_for_tests import Driven


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_that_the_references_were_made_of(tmp_path: Path, case: str) -> None:
    files = target_gguf(case).write(tmp_path / "target.gguf"), head_gguf(case).write(tmp_path / "head.gguf")
    assert [digest(file) for file in files] == golden(case)["digests"].tolist()


def test_files_in_q8_0_hold_the_weights_of_the_float32_ones() -> None:
    names = {"fc": "fc", "lm_head": "output", "midlayer.mlp.down_proj": "blk.0.ffn_down"}
    for name, tensor in names.items():
        np.testing.assert_array_equal(
            head_gguf("llama").values(f"{tensor}.weight"), head_weights()[f"{name}.weight"]
        )


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
    export_model(head, folder / "h", options=ExportOptions(role="drafter", target=target))
    return case, folder / "t", folder / "h"


def test_drafts_are_those_of_the_paper_and_of_llama_cpp(pair: tuple[str, Path, Path]) -> None:
    """Activations of eight bits move near-ties; where logits lie 15 % of their spread apart none moves."""
    case, target, head = pair
    bundle, stored = Bundle(head), golden(case)
    reads = CpuSession(Bundle(target), read_layers=bundle.config.feature_layers)
    drafts, session = np.full_like(stored["drafts"], -1), CpuSession(bundle)
    with closing(reads), closing(session):
        session.reserve(session.longest)
        for index, (prompt, tokens) in enumerate(zip(stored["prompts"], stored["tokens"], strict=True)):
            text = [token for token in prompt.tolist() if token >= 0]
            reads.truncate(0)
            reader = HeadReader(session, CostCurve({1: 1.0}))
            reader.hear(reads.predict(text[:-1]).hidden)
            for place, token in enumerate(tokens.tolist()):
                said = [alone(reader.read(text), reader.clock)]
                while len(said) < drafts.shape[-1]:
                    said.append(alone(reader.step(said[-1].following), reader.clock))
                drafts[index, place] = [each.following for each in said]
                reader.hear(reads.predict(text[-1:]).hidden)
                text.append(token)
    for other, margins in (("drafts", "margins"), ("llama_drafts", "llama_margins")):
        same, of = compared(drafts, stored[other], stored[margins], 0.15)
        assert same == of > drafts.size // 2


def test_answers_with_a_head_are_those_without(pair: tuple[str, Path, Path]) -> None:
    """Several at once: a pass of the head reads features of some and states of others."""
    _, target, head = pair
    ways: list[RequestOptions] = [{"max_new_tokens": 40}, {"temperature": 0.9, "seed": 5}]
    prompts = "what is", "a longer prompt of several words", "x"
    with load(target, head) as model, load(target, None) as plain:
        one, pricing, side = Driven(model), cast(Any, model._runner.pricing), cast(Any, model._side)
        pricing._curve, side.curve = FREE, QUICK  # which pays, whatever it takes
        pricing.observe_pass = pricing.observe_round = lambda *told: None
        for options in ways:
            streams = [one.queue(model.stream(prompt, **options)) for prompt in prompts]
            one.run()
            for prompt, stream in zip(prompts, streams, strict=True):
                assert stream.result.tokens == plain.generate(prompt, **options).tokens
                assert stream.result.stats.by_source["model"].drafted > 5
