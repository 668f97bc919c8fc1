"""Tokens that a model's files exclude from answers are never written, with drafts and without."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.draft import Draft, Round
from edgespec.decoding.sampling import SamplingParams, Suppressed
from edgespec.running.verifier import Verifier
from edgespec_export.sources.gguf_tokenizer import special_tokens
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import ModelFileError
from edgespec_models.text.tokenizer import SpecialTokens
from edgespec_runtimes.predictions import Predictions
from tests.kit.hf import VOCAB, config_of, write_checkpoint
from tests.kit.models import toy_bundle, toy_model
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import Deaf, RandomDrafter, ToySession, decode

PROMPT = [4, 4]
ROWS = np.tile(np.arange(9, 0, -1, dtype=np.float32), (4, 1))  # token 0 is the likeliest, then 1
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7, seed=3)


def special(**excluded: Any) -> SpecialTokens:
    return SpecialTokens(None, (), add_bos=False, **excluded)


def verifier(params: SamplingParams = GREEDY, **excluded: tuple[Any, ...]) -> Verifier:
    return Verifier(params, (), Suppressed(special(**excluded), len(PROMPT)))


@pytest.mark.parametrize(
    ("excluded", "before", "drafted", "expected"),
    [
        ({"suppressed": (0,)}, [], (), (0, 1)),
        ({"suppressed": (0, 1)}, [], (2, 0), (1, 2)),
        ({"suppressed_first": (0,)}, [], (1, 0), (2, 0)),
        ({"suppressed_first": (0,)}, [5], (), (0, 0)),
        ({"bad_words": ((0,),)}, [], (1,), (1, 1)),
        ({"bad_words": ((4, 4, 0),)}, [], (), (0, 1)),  # words may begin in the prompt
        ({"bad_words": ((0, 0), (4, 0))}, [], (1, 0, 0), (2, 1)),  # and end in the draft
        ({"bad_words": ((5, 4, 4, 4, 0),)}, [], (), (0, 0)),
    ],
)
def test_the_likeliest_other_token_is_written(
    excluded: dict[str, Any], before: list[int], drafted: tuple[int, ...], expected: tuple[int, int]
) -> None:
    predictions = Predictions(ROWS[: len(drafted) + 1])
    tokens = [*PROMPT, *before]
    assert verifier(**excluded)(predictions, Draft(drafted), tokens) == expected
    biased = SamplingParams(logit_bias={0: 1.0})
    assert verifier(biased, **excluded)(predictions, Draft(drafted), tokens) == expected


def test_no_bias_and_no_draw_brings_them_back() -> None:
    for seed in range(50):
        params = SamplingParams(temperature=2.0, seed=seed, logit_bias={0: 100.0})
        _, token = verifier(params, suppressed=(0,))(Predictions(ROWS[:1]), Draft(()), PROMPT)
        assert token != 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_drafts_never_hold_them_and_change_nothing(params: SamplingParams) -> None:
    excluded: dict[str, Any] = {"suppressed": (3,), "bad_words": ((1, 2),)}

    def answer(drafter: Deaf) -> tuple[list[int], list[Round]]:
        tokens = list(PROMPT)
        target = ToySession.markov(0, 6, scale=1.0)
        rounds = list(
            decode(target, drafter, verifier(params, **excluded), tokens, max_new_tokens=60, max_draft=4)
        )
        return tokens, rounds

    plain, _ = answer(Deaf())
    tokens, rounds = answer(RandomDrafter(0, 6))
    assert tokens == plain and 3 not in tokens and (1, 2) not in pairwise(tokens)
    assert any(round_.draft.tokens for round_ in rounds)
    assert all(3 not in round_.draft.tokens for round_ in rounds)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_model_never_writes_them(params: dict[str, Any]) -> None:
    def answer(excluded: SpecialTokens) -> tuple[int, ...]:
        def bundle(name: str, context: int) -> Bundle:
            made = toy_bundle(name, context)
            made.manifest.special_tokens = excluded  # type: ignore[misc]  # a stand-in
            return made

        with toy_model(bundle=bundle) as model:
            return model.generate("the", max_new_tokens=24, stop_at_eos=False, **params).tokens

    usual = answer(special())
    excluded = special(suppressed=(usual[5],), suppressed_first=(usual[0],))
    tokens = answer(excluded)
    assert usual[5] not in tokens and tokens[0] != usual[0] and len(tokens) == 24


def test_files_of_the_hub_name_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_of("llama") | {"eos_token_id": 2})
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")

    def read(**facts: object) -> SpecialTokens:
        (folder / "generation_config.json").write_text(json.dumps(facts), encoding="utf-8")
        with HFCheckpoint(folder) as opened:
            return opened.special_tokens()

    excluded = read(
        suppress_tokens=[9, VOCAB, 8, 9],
        begin_suppress_tokens=7,
        bad_words_ids=[[5], [6, 5], [2], [1, VOCAB]],
    )
    assert (excluded.suppressed, excluded.suppressed_first) == ((9, 8), (7,))
    assert excluded.bad_words == ((5,), (6, 5))  # the end may be written, as in transformers
    assert not read(suppress_tokens=None).suppressed
    malformed: tuple[object, ...] = ("9", ["9"], [True], [[]])
    for wrong in malformed:
        with pytest.raises(ModelFileError, match=r"generation_config\.json: suppress_tokens has"):
            read(suppress_tokens=wrong)


def test_gguf_files_name_them() -> None:
    keys: dict[str, object] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "c"]}
    for ids in (np.array([1, 3, -1], np.int32), [1, 1]):
        assert special_tokens(keys | {"tokenizer.ggml.suppress_tokens": ids}).suppressed == (1,)
    malformed: tuple[object, ...] = ("1", ["a"], [[1]], 3)
    for wrong in malformed:
        with pytest.raises(ModelFileError, match=r"suppress_tokens is .*a list of ids"):
            special_tokens(keys | {"tokenizer.ggml.suppress_tokens": wrong})
