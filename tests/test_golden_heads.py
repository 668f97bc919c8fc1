"""Tiny EAGLE-3 heads: the files that tests write are those of the references, and the references agree."""

from pathlib import Path

import numpy as np
import pytest

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
)


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
