"""The bench: what it runs, and the figures it makes of that."""

import json
import os
import platform
import stat
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.answering.results import GenerationStats
from edgespec.measuring.bench import BenchOptions, Pair, mbsu, measure, speedup, summarize, typical
from edgespec.measuring.prompts import Prompt
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress
from edgespec_models.storage import check_writable, write_text
from tests.kit.fake_model import PLAIN_STEP_S, FakeModel

PROMPTS = (
    Prompt("w1", "writing", ("write", "later turn")),
    Prompt("c1", "coding", ("code one",)),
    Prompt("c2", "coding", ("code two",)),
)
OPTIONS = BenchOptions(max_new_tokens=8, seed=5)


def pairs_of(model: FakeModel, options: BenchOptions = OPTIONS) -> list[Pair]:
    return list(measure(model.as_model(), PROMPTS, options))


def test_both_ways_take_turns_with_the_same_options_and_a_cold_cache() -> None:
    model, seen = FakeModel(template=False), list[Progress]()  # without one, the prompt is continued
    run = measure(model.as_model(), PROMPTS, OPTIONS, progress=seen.append)
    assert next(run).plain.text == "re: write" and len(list(run)) == 2
    assert [(p.done, p.total) for p in seen] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    requests = [(prompt, options["speculate"]) for prompt, options in model.calls]
    assert model.forgotten == len(requests)
    turns = (("write", False), ("code one", True), ("code two", False))  # which way is first
    wanted = [(prompt, way) for prompt, first in turns for way in (first, not first)]
    assert requests[2:] == wanted  # behind the warm-up, both ways
    measured = [options for _, options in model.calls[2:]]
    same = {"max_new_tokens": 8, "temperature": 0.0, "seed": 5, "stop_at_eos": True}
    assert all({k: v for k, v in options.items() if k != "speculate"} == same for options in measured)


class Disturbed(FakeModel):
    """Answers take ``factor`` times as long in the calls whose numbers are ``slow``; 1 and 2 warm up."""

    slow: Collection[int] = ()
    factor = 3.0

    def _stats(self, prompt: str, count: int, speculate: bool) -> GenerationStats:
        stats = super()._stats(prompt, count, speculate)
        slow = len(self.calls) in self.slow
        return replace(stats, decode_s=stats.decode_s * self.factor) if slow else stats


HICCUPS: tuple[Collection[int], ...] = ((), (4,), (9,), range(4, 7), range(5, 9), range(9, 12), range(7, 12))


@pytest.mark.parametrize("slow", HICCUPS)
def test_a_hiccup_shows_in_no_category(slow: Collection[int]) -> None:
    """Calls 3 to 8 ask each prompt once, 9 to 14 a second time, and further ones what was disturbed."""
    model = Disturbed()
    model.slow = slow
    pairs = list(measure(model.as_model(), PROMPTS, OPTIONS, turns=4))
    disturbed = {(call - 3) % 6 // 2 for call in slow}  # prompts; a third turn settles each
    assert len(model.calls) == 2 + 12 + 2 * len(disturbed)
    chosen = typical(pairs)
    assert [pair.prompt for pair in chosen] == list(PROMPTS)
    settled = summarize(model.as_model(), chosen, OPTIONS)["speedup"]["by_category"]
    assert settled == pytest.approx({"writing": 2.0, "coding": 2.0})
    once = summarize(model.as_model(), pairs[:3], OPTIONS)["speedup"]["by_category"]
    assert (min(once.values()) < 1.5) == (slow in ((4,), range(4, 7)))


def test_answers_that_never_agree_end() -> None:
    model = Disturbed()
    model.slow = range(3, 100)
    for turn in range(6):
        model.factor = 1.0 + turn
        assert len(list(measure(model.as_model(), PROMPTS, OPTIONS, turns=2))) == 6


def test_speedup_is_the_ratio_of_seconds_per_token() -> None:
    pairs = pairs_of(FakeModel(speed={"write": 4.0, "": 1.0}))
    longer = replace(pairs[0].plain.stats, decode_s=pairs[0].plain.stats.decode_s * 10, decode_tokens=70)
    unequal = replace(pairs[0], plain=replace(pairs[0].plain, stats=longer))
    assert speedup([unequal]) == pytest.approx(4.0)


def test_answers_of_one_token_have_no_speedup() -> None:
    pairs = pairs_of(FakeModel(new_tokens=1))
    assert speedup(pairs) is None
    result = summarize(FakeModel().as_model(), pairs, OPTIONS)
    none = {"writing": None, "coding": None}
    assert result["speedup"] == {"overall": None, "request": 1.0, "by_category": none}
    assert result["spread"]["speedup"] is None
    json.dumps(result, allow_nan=False)


def test_the_documented_keys_hold_the_right_figures() -> None:
    model = FakeModel(speed={"write": 4.0, "code": 2.0, "": 1.0}, flips=("two",))
    result = summarize(model.as_model(), pairs_of(model), OPTIONS)
    decode_s = 7 * PLAIN_STEP_S
    assert result["format"] == 1 and result["complete"] is True
    assert (result["prompts"], result["identical"]) == (3, 2)
    assert result["speedup"]["overall"] == pytest.approx(2.4)
    assert result["speedup"]["by_category"] == pytest.approx({"writing": 4.0, "coding": 2.0})
    request = (1.5 + 3 * decode_s) / (1.5 + decode_s * (1 / 4 + 1 / 2 + 1 / 2))
    assert result["speedup"]["request"] == pytest.approx(request)
    assert result["plain"]["tokens_per_second"] == pytest.approx(10.0)
    assert result["speculative"]["tokens_per_second"] == pytest.approx(24.0)
    assert result["block_efficiency"] == 2.0
    assert result["acceptance_rate"] == 0.5
    assert result["by_source"] == {"model": {"drafted": 24, "accepted": 12, "acceptance_rate": 0.5}}
    assert result["acceptance_by_position"] == [
        {"position": 1, "drafted": 12, "accepted": 12, "rate": 1.0},
        {"position": 2, "drafted": 12, "accepted": 0, "rate": 0.0},
    ]
    # tau 2, gamma 2; the drafter reads a tenth of the bytes and a quarter of the parameters.
    assert result["mbsu"] == pytest.approx({"bytes": 2 / 1.2, "parameters": 2 / 1.5, "gamma": 2.0})
    assert result["ttft_ms"] == pytest.approx({"plain": 500.0, "speculative": 500.0})
    assert result["tpot_ms"] == pytest.approx({"plain": 100.0, "speculative": 50.0})
    spread = {"min": 2.0, "q1": 2.0, "median": 2.0, "q3": 3.0, "max": 4.0}
    assert result["spread"]["speedup"] == pytest.approx(spread)
    assert result["cost_curve"][1] == pytest.approx({"n": 2, "ms": 110.0})
    assert result["drafter_step_ms"] == pytest.approx(20.0)
    assert result["drafter_share"] == pytest.approx(0.25)
    assert result["bytes_per_pass"] == 1000
    assert result["gigabytes_per_second"]["plain"] == pytest.approx(1000 / 1e9 / 0.1)
    assert result["peak_memory_bytes"] > 1_000_000
    assert result["models"]["drafter"]["name"] == "fake-drafter"
    assert [row["id"] for row in result["rows"]] == ["w1", "c1", "c2"]
    assert [row["identical"] for row in result["rows"]] == [True, True, False]
    json.dumps(result, allow_nan=False)


def test_what_is_missing_is_null_or_said() -> None:
    model = FakeModel(drafter_name=None, drafter_step_s=None)
    result = summarize(model.as_model(), pairs_of(model), OPTIONS)
    assert result["mbsu"]["bytes"] == result["mbsu"]["parameters"] == result["block_efficiency"]
    assert result["models"]["drafter"] is None and result["drafter_step_ms"] is None
    model = FakeModel(drafts=False)
    result = summarize(model.as_model(), pairs_of(model), OPTIONS)
    assert result["acceptance_rate"] is None and result["acceptance_by_position"] == []
    assert result["drafter_share"] == 0.0
    assert result["speculation_off"] == {"too <slow>": 3}
    assert result["speedup"]["overall"] == pytest.approx(1.0)


def test_nothing_that_names_the_host_is_in_the_figures() -> None:
    machine = summarize(FakeModel().as_model(), [], OPTIONS)["machine"]
    assert platform.node() not in json.dumps({k: v for k, v in machine.items() if k != "packages"})
    assert machine["cpu"] and machine["memory_bytes"] > 0 and "onnxruntime" in machine["packages"]


@given(tau=st.floats(1, 9), gamma=st.floats(0, 8), c=st.floats(0, 2))
def test_mbsu_never_exceeds_block_efficiency(tau: float, gamma: float, c: float) -> None:
    assert 0 < mbsu(tau, gamma, c) <= tau
    assert mbsu(tau, 0.0, c) == mbsu(tau, gamma, 0.0) == tau


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_text(path, "first\n")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_bytes() == b"first\n"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    if os.name == "posix":
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_one_token_and_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(RequestError, match="max_new_tokens is 1"):
        BenchOptions(max_new_tokens=1)
    with pytest.raises(RequestError, match="does not exist"):
        write_text(tmp_path / "none" / "out.json", "text")
