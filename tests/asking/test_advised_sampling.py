"""The sampling that a model's makers advise: kept with the bundle, shown, and used where it is asked for."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import edgespec
from edgespec.asking.request import Request
from edgespec.cli import app, options
from edgespec.serve.options import ServeOptions
from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import MANIFEST, Bundle, Manifest, Sampling
from edgespec_models.errors import RequestError
from edgespec_models.files.facts import Facts
from tests.kit.fake_model import FakeModel
from tests.kit.gguf import tiny_gguf
from tests.kit.hf import config_of, weights, write_with_tokenizer
from tests.kit.serving import ServedModel, ask, serving

ADVICE = Sampling(temperature=0.6, top_k=20, top_p=0.95)
TOLD = "temperature 0.6, top_k 20, top_p 0.95"
READ: dict[str, tuple[dict[str, Any], Sampling | None]] = {
    "stated": (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2},
        ADVICE,
    ),
    "unstated temperature": ({"do_sample": True}, Sampling(temperature=1.0)),
    "greedy": ({"do_sample": False, "temperature": 0.6}, None),
    "a number alone": ({"repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
    "nothing": ({"eos_token_id": 2, "temperature": None}, None),
    "out of range": ({"temperature": -1, "top_k": "many", "min_p": 0.15}, Sampling(min_p=0.15)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = config_of("llama")
    folder = write_with_tokenizer(tmp_path_factory.mktemp("advised") / "m", facts, weights(facts))
    (folder / "generation_config.json").write_text(json.dumps(READ["stated"][0]), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("facts", "advice"), READ.values(), ids=READ)
def test_advice_is_read_as_transformers_reads_it(
    facts: dict[str, Any], advice: Sampling | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        assert Sampling.advised(Facts(facts, "generation_config.json")) == advice
    assert ("left out" in caplog.text) == ("many" in facts.values())


def test_bundles_keep_it_and_earlier_ones_have_none(source: Path, tmp_path: Path) -> None:
    export_model(source, tmp_path / "out")
    bundle = Bundle(tmp_path / "out", verify_digests=True)
    assert bundle.manifest.sampling == ADVICE
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")])
    assert TOLD in " ".join(shown.stdout.split())
    earlier = bundle.manifest.to_json()
    del earlier["sampling"]
    assert Manifest.from_json(earlier, tmp_path / MANIFEST).sampling is None


def test_gguf_files_state_it(tmp_path: Path) -> None:
    model = tiny_gguf("llama")
    stated = {"temp": 0.6, "top_k": 20, "top_p": 0.95}
    model.metadata |= {f"general.sampling.{name}": value for name, value in stated.items()}
    export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    sampling = Bundle(tmp_path / "out").manifest.sampling
    assert sampling is not None and sampling.options() == ADVICE.options()


def test_requests_ask_for_it_by_name(source: Path, home: Path) -> None:
    with edgespec.load(source, None) as model:
        greedy, *others = (
            model.generate("the rain", max_tokens=12, stop_at_eos=False, seed=3, **more).tokens
            for more in ({}, {"sampling": None}, {"temperature": 0.0, "sampling": "recommended"})
        )
        assert others == [greedy] * 2
        sampled, same, other = (
            model.generate("the rain", max_tokens=12, stop_at_eos=False, seed=3, **more).tokens
            for more in ({"sampling": "recommended"}, ADVICE.options(), {"temperature": 0.6})
        )
        assert sampled == same != greedy and other != greedy
    with pytest.raises(RequestError, match=r"sampling is 'best'; allowed: .*'recommended'"):
        Request.of({"sampling": "best"})  # type: ignore[typeddict-item]  # what a caller may write


def test_chat_follows_it_but_for_what_the_command_line_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    model.target.manifest.sampling = ADVICE
    monkeypatch.setattr(options, "load_model", lambda context, progress: model)
    told = CliRunner().invoke(app, ["chat", "t", "--temperature", "0", "--json"], input="hi\n")
    assert f"makers advise {TOLD}." in " ".join(told.stderr.split())
    (asked,) = (sent for _, sent in model.calls)
    assert (asked["sampling"], asked["temperature"]) == ("recommended", 0.0) and "top_k" not in asked


def test_servers_follow_it_where_they_are_told_to() -> None:
    body = {"model": "served", "messages": [{"role": "user", "content": "hello"}], "top_k": 5}
    for stated in (None, "recommended"):
        model = ServedModel()
        with serving(model.as_model(), ServeOptions(port=0, sampling=stated)) as url:
            assert ask(url, "/v1/chat/completions", body).status == 200
        assert model.calls[-1][1].get("sampling") == stated and model.calls[-1][1]["top_k"] == 5
