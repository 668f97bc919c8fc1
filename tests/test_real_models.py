"""Models of the catalogue: parity of their exports, and lossless decoding with a foreign drafter."""

import json
from pathlib import Path

import pytest

import edgespec
from edgespec.drafting.bridge import ByteBridge
from edgespec.loading.opening import open_model
from edgespec.running.verifier import Verifier
from edgespec_export.graphs.parity import check_parity, find_golden, session_logits
from edgespec_models.bundles.bundle import Role
from edgespec_models.downloads.catalog import find
from edgespec_models.downloads.download import pull
from edgespec_runtimes.cpu import open_cpu
from tests.kit.drafters import GREEDY, model_of
from tests.kit.toy import Silent, decode

pytestmark = pytest.mark.models

TOKENIZERS = Path(__file__).parent / "golden" / "tokenizers.json"
MIN_TOP1 = 0.93
MAX_KL = 0.01
"""Edgespec's kernels compute the same bits on every processor: .965 to .977, and .0006 to .0041."""
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Italien heißt",
)
ROLES: dict[str, Role] = {
    "smollm2-135m-instruct": "drafter",
    "gemma-3-270m": "target",
    "qwen2.5-coder-0.5b-instruct": "target",
}


@pytest.mark.parametrize("name", ROLES)
def test_an_export_computes_what_its_source_computes(name: str) -> None:
    entry = find(name)
    pull(entry)
    bundle = open_model(name, ROLES[name])
    assert bundle.manifest.provenance["sha256"] == entry.sha256
    stored = bundle.report()["parity"]
    assert stored["top1_agreement"] >= MIN_TOP1
    assert stored["kl"] <= MAX_KL
    # Columns for tokens of the prompt, which a trimmed head has besides, are ONNX Runtime's own product.
    assert bundle.report()["row_exact"] == (bundle.head_tokens is None)
    golden = find_golden(entry.sha256)
    assert golden is not None
    session = open_cpu(bundle)
    try:
        now = check_parity(session_logits(session, golden), golden, bundle.head_tokens)
    finally:
        session.close()
    assert now["positions"] == stored["positions"] > 100
    assert now["top1_agreement"] == stored["top1_agreement"]
    assert now["kl"] == pytest.approx(stored["kl"], rel=1e-6)


def test_a_bundle_keeps_the_tokenizer() -> None:
    """Ids of llama.cpp and transformers."""
    cases = json.loads(TOKENIZERS.read_text(encoding="utf-8"))
    for name, role in ROLES.items():
        tokenizer = open_model(name, role).tokenizer
        for case in cases[name]:
            if name != "gemma-3-270m" or "</s>" not in case["text"]:  # a control token to llama.cpp only
                assert tokenizer.encode(case["text"]) == case["ids"], (name, case["text"])


def test_a_drafter_of_another_vocabulary_changes_nothing() -> None:
    with edgespec.load("qwen2.5-coder-0.5b-instruct", "gemma-3-270m") as model:
        for prompt in PROMPTS:
            plain = model.generate(prompt, max_new_tokens=24, speculate=False)
            speculative = model.generate(prompt, max_new_tokens=24)
            assert speculative.tokens == plain.tokens
            assert speculative.text == plain.text


def test_drafts_that_are_always_verified_change_nothing() -> None:
    """The same without the pricing that may keep a slow drafter silent."""
    target, small = open_model("gemma-3-270m", "target"), open_model("smollm2-135m-instruct", "drafter")
    session, side = open_cpu(target), open_cpu(small)
    session.reserve(256)
    side.reserve(256)
    drafted = accepted = 0
    for prompt in PROMPTS:
        special = target.manifest.special_tokens
        start = [special.bos] if special.add_bos and special.bos is not None else []
        tokens = start + target.tokenizer.encode(prompt)
        bridge = ByteBridge(
            target.tokenizer,
            small.tokenizer,
            prompt_length=len(tokens),
            drafter_prompt=small.tokenizer.encode(prompt),
        )
        drafter = model_of(side, bridge)
        plain, speculative = list(tokens), list(tokens)
        list(decode(session, Silent(), Verifier(GREEDY), plain, max_new_tokens=24, max_draft=0))
        steps = list(decode(session, drafter, Verifier(GREEDY), speculative, max_new_tokens=24, max_draft=6))
        assert speculative == plain
        drafted += sum(len(step.draft.tokens) for step in steps)
        accepted += sum(step.accepted for step in steps)
    session.close()
    side.close()
    assert drafted > accepted > 0
