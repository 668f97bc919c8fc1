"""Qwen3.5's delta nets from file to text: what is left out, what is refused, rollback, and drafts."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions
from edgespec_export.export import export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import LOGGED, bytes_per_sequence
from edgespec_models.errors import EdgespecError
from edgespec_models.families import read_config
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.gguf import F32
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import VOCAB, config_of, write_checkpoint, write_with_tower
from tests.kit.models import runner_of
from tests.kit.states import check_rows


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen35")
    export_model(gguf_of("qwen35", "Q8_0").write(folder / "m.gguf"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def sessions(bundle: Path) -> Iterator[list[Session]]:
    """Three sequences of one model, the last of which reads texts in one pass."""
    first = open_cpu(Bundle(bundle))
    opened = [first, first.model.session(), first.model.session()]
    yield opened
    for session in opened:
        session.close()


# ---- Files -------------------------------------------------------------------------------------------------


def test_vision_and_the_mtp_layer_of_a_directory_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = config_of("qwen35")
    text = {**alone, "mtp_num_hidden_layers": 1}
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    left_out = "model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"
    with (
        HFCheckpoint(write_checkpoint(tmp_path / "alone", alone)) as expected,
        HFCheckpoint(write_with_tower(tmp_path / "whole", alone, outer, left_out)) as opened,
    ):
        assert opened.config == expected.config and opened.tensors.keys() == expected.tensors.keys()
        assert opened.changes == {"left_out": "mtp"} and not expected.changes
    assert "whole: only the text model is exported; it reads no images" in caplog.text


def test_layers_are_listed_or_regular(tmp_path: Path) -> None:
    """With a list of layers, with an interval, and with neither, which is every fourth."""
    types = []
    listed: dict[str, Any] = {"attention.recurrent_layers": [True, True, True, False]}
    for changed in (listed | {"full_attention_interval": None}, {}, {"full_attention_interval": None}):
        with GGUFCheckpoint(gguf_of("qwen35", **changed).write(tmp_path / "m.gguf")) as opened:
            types.append(opened.config.layer_types)
    assert types == [("linear_attention",) * 3 + ("full_attention",)] * 3


def test_a_list_of_layers_counts_before_an_interval() -> None:
    """As in transformers: layers that were taken out leave an irregular list and the old interval."""
    for types in (
        ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        ["full_attention"] * 4,
    ):
        facts = config_of("qwen35") | {"layer_types": types, "full_attention_interval": 4}
        made = read_config(Facts(facts, "config.json")).layer_types
        assert made == (tuple(types) if "linear_attention" in types else ())


def test_of_a_layer_for_mtp_the_trunk_is_read(tmp_path: Path) -> None:
    with GGUFCheckpoint(gguf_of("qwen35", nextn_predict_layers=1).write(tmp_path / "m.gguf")) as opened:
        assert opened.config.num_layers == 3


def test_decays_and_strengths_take_8_bits(tmp_path: Path) -> None:
    """In a file that leaves matrices in floats, and where 4 bits are asked for of the others."""
    export_model(gguf_of("qwen35").write(tmp_path / "m.gguf"), tmp_path / "out")
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.formats.keys() == {"Q8_0"}
    vectors = manifest.parameters_by_class["other"]
    assert vectors == 64 + 4 * 2 * 64 + 2 * 64 + 3 * (4 * 192 + 32 + 2 * 4)  # norms, convolutions, decays


# ---- Sequences ---------------------------------------------------------------------------------------------


def text_of(rng: np.random.Generator, tokens: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB, tokens)]


def plain(session: Session, text: list[int]) -> F32:
    session.rewind(0)
    return session.predict(text).logits.copy()


def test_a_sequence_keeps_states_of_one_size(bundle: Path, sessions: list[Session]) -> None:
    kept = Bundle(bundle).manifest.kept
    names = [tensor.input for tensor in kept if tensor.per == "sequence"]
    assert names == [f"past_{kind}.{layer}" for layer in range(3) for kind in ("state", "log", "inputs")]
    state, row, inputs = 4 * 32 * 16, 2 * 16 + 4 * 32 + 4, 2 * 2 * 16 + 4 * 32
    assert bytes_per_sequence(kept) == 3 * 4 * (state + LOGGED * row + (LOGGED + 3) * inputs)
    assert sessions[0].model.kv_bytes >= bytes_per_sequence(kept)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(sessions: list[Session], data: st.DataObject) -> None:
    """Drafts, of which some stay, and rewinds, of several sequences in common passes or alone."""
    reference = sessions[-1]
    rows = partial(plain, reference)
    check_rows(data, reference.model, rows, place_behind=lambda length: 0)


def test_what_a_slot_held_before_is_nothing_to_its_next_sequence(bundle: Path) -> None:
    """A state that is no number stays with its sequence."""
    text = text_of(np.random.default_rng(0), 30)
    with closing(open_cpu(Bundle(bundle))) as session:
        wanted = plain(session, text)
        states: Any = session.model
        for array in states.states.arrays:
            array[:] = np.nan
        np.testing.assert_array_equal(plain(session, text), wanted)


def test_a_state_that_is_no_number_is_an_error_of_its_request(
    bundle: Path, own_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request goes on, and what the first has asked is answered when it is asked again."""
    prompts, passes = ["one two three four five six", "seven eight nine"], count()
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_at_eos": False}
    with edgespec.load(bundle, None, options=LoadOptions(threads=1, parallel=2)) as model:
        wanted = [model.generate(prompt, **options).tokens for prompt in prompts]
        model.forget()
        loaded: Any = runner_of(model).session.model
        run = loaded.run

        def damaged(parts: Any) -> Any:
            if len(parts) == 2 and next(passes) == 1:
                for array in loaded.states.arrays:
                    array[parts[0].slot] = np.nan
            return run(parts)

        monkeypatch.setattr(loaded, "run", damaged)
        model.pause()
        first, second = (model.stream(prompt, **options) for prompt in prompts)
        first.start()
        second.start()
        model.resume()
        with pytest.raises(EdgespecError, match="not a finite number"):
            first.run()
        assert second.run().tokens == wanted[1]
        begun = [*model.target.tokenizer.encode(prompts[0]), *wanted[0][:3]]
        assert model.generate(begun, **{**options, "max_new_tokens": 17}).tokens == wanted[0][3:]


# ---- Prompts that were read --------------------------------------------------------------------------------


def test_a_text_goes_on_from_where_its_prompt_ended(bundle: Path, own_prompts: Path) -> None:
    """In memory after another answer, and in a new process; the text is that of a model that reads all."""
    prompt = "one two three four five six seven eight nine ten eleven twelve"
    options: dict[str, Any] = {"max_new_tokens": 8, "stop_at_eos": False}
    with edgespec.load(bundle, "ngram", options=LoadOptions(threads=1)) as model:
        first = model.generate(prompt, **options)
        model.generate("another text, which takes the place of the first in the session", **options)
        again, longer = model.generate(prompt, **options), model.generate(prompt + " and more", **options)
    assert first.stats.cached_tokens == 0 and again.tokens == first.tokens
    assert again.stats.cached_tokens >= again.stats.prompt_tokens - 1
    assert longer.stats.cached_tokens >= first.stats.prompt_tokens - 1
    with edgespec.load(bundle, "ngram", options=LoadOptions(threads=1)) as model:
        restarted = model.generate(prompt + " and more", **options)
    assert restarted.stats.cached_tokens >= first.stats.prompt_tokens - 1
    with edgespec.load(bundle, None, options=LoadOptions(threads=1, prompt_cache_bytes=0)) as model:
        assert model.generate(prompt + " and more", **options).tokens == restarted.tokens == longer.tokens


START, END = 1, 2  # the control tokens around messages
ROLE, THINK = [70, 71], [72, 73]


def dialogue(*messages: int, tools: int = 0) -> list[int]:
    """A prompt with a long system message, as templates write it that open thoughts and drop earlier ones."""
    contents = [text_of(np.random.default_rng(9 + tools), 90)]
    contents += [text_of(np.random.default_rng(number), 60) for number in messages]
    return [*(token for content in contents for token in (START, *ROLE, *content, END)), START, *ROLE, *THINK]


def test_dialogues_read_what_is_new_to_them(tmp_path: Path, own_prompts: Path) -> None:
    """In memory, after a restart, beside each other, and where there is no room for states."""
    tiny = gguf_of("qwen35", "Q8_0")
    tiny.metadata["qwen35.context_length"] = 1024
    export_model(tiny.write(tmp_path / "m.gguf"), tmp_path / "bundle")
    prompts = [dialogue(1), dialogue(2), dialogue(1, 3, 4), dialogue(1, tools=1), dialogue(5)]
    system = len(dialogue()) - 1 - len(ROLE) - len(THINK)
    answers = list[tuple[int, ...]]()

    def asked(model: edgespec.Model, prompt: list[int]) -> int:
        answer = model.generate(prompt, max_new_tokens=8, stop_at_eos=False)
        answers.append(answer.tokens)
        return answer.stats.prompt_tokens - answer.stats.cached_tokens

    with edgespec.load(tmp_path / "bundle", "ngram", options=LoadOptions(threads=1)) as model:
        read = [asked(model, prompt) for prompt in prompts]
        first, new = len(prompts[0]), len(prompts[0]) - system
        assert read == [first, new, len(prompts[2]) - first + len(THINK), first, new]
        beside = model.generate(prompts[1], max_new_tokens=8, n=3, temperature=1.0, seed=1)
        assert [other.stats.cached_tokens for other in beside.others] == [len(prompts[1]) - 1] * 2
    with edgespec.load(tmp_path / "bundle", None, options=LoadOptions(threads=1)) as model:
        assert asked(model, dialogue(6)) == new
    options = LoadOptions(threads=1, cache_bytes=0, prompt_cache_bytes=0)
    with edgespec.load(tmp_path / "bundle", None, options=options) as model:
        again = [model.generate(p, max_new_tokens=8, stop_at_eos=False) for p in (*prompts, dialogue(6))]
    assert [each.tokens for each in again] == answers
