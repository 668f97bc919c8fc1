"""Training an alignment: needs PyTorch, which the gate does without (extra ``align``)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'align', which the gate does without")

import torch
from typer.testing import CliRunner

from edgespec.align import answering
from edgespec.align import run as running
from edgespec.cli import app
from edgespec_export.align import training
from edgespec_export.align.alignment import Alignment, Origin, open_aligned, read_alignment
from edgespec_export.align.decoder import TorchDecoder, batch_of
from edgespec_export.align.settings import Guesses, Text, TrainingOptions
from edgespec_export.align.training import first_guesses, train
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError, RequestError
from edgespec_models.progress import Progress, ignore_progress
from tests.export.test_hf_export import checkpoint, distance
from tests.kit.fake_model import FakeModel
from tests.kit.gguf import ARCHITECTURES, HIDDEN, reference_weights, tiny_gguf
from tests.kit.hf import PLAIN, ROWS, TOKENS
from tests.kit.toy import TinyModel
from tests.models.test_graphs import reference_logits

OPTIONS = TrainingOptions(rank=4, rate=0.01, batch_tokens=64)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf("llama", "Q4_1").write(tmp_path / "m.gguf")


def _texts(count: int = 24, seed: int = 0) -> list[Text]:
    """Answers count up from the prompt's last token, which a random drafter does not guess."""
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        prompt = [int(token) for token in rng.integers(5, 60, 4 + number % 3)]
        answer = [(prompt[-1] + 1 + step) % 64 for step in range(8 + number % 5)]
        texts.append(Text((*prompt, *answer), len(prompt), "even" if number % 2 == 0 else "odd"))
    return texts


def count_right(decoder: TorchDecoder, texts: list[Text]) -> Guesses:
    """Right first guesses, by category."""
    return running.count_guesses(texts, first_guesses(decoder, texts))


def _logits(decoder: TorchDecoder, tokens: list[int]) -> np.ndarray:
    """Behind every token; what is filled up behind a text, and other texts, change nothing."""
    batch = batch_of([Text((*tokens, 0), 1), Text((3, 1, 2, *tokens, 5, 5), 2)])
    with torch.no_grad():
        rows = decoder.rows(batch)[: len(tokens)]
        logits: np.ndarray = decoder._logits(rows).numpy()
    return logits


@pytest.mark.parametrize("case", PLAIN)
def test_the_decoder_computes_what_transformers_computes(tmp_path: Path, case: str) -> None:
    with open_checkpoint(checkpoint(tmp_path / "m", case)) as opened:
        logits = _logits(TorchDecoder(opened), list(TOKENS))
    assert distance(logits[list(ROWS)], case) < 2e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_and_what_a_gguf_file_says(tmp_path: Path, architecture: str) -> None:
    model, tokens = tiny_gguf(architecture, "Q4_1"), [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 380]
    with open_checkpoint(model.write(tmp_path / "m.gguf")) as opened:
        expected = reference_logits(TinyModel(tmp_path, opened.config, reference_weights(model)), tokens)
        result = _logits(TorchDecoder(opened), tokens)
    np.testing.assert_allclose(result, expected, atol=2e-5 * float(expected.std()) * 50)


@pytest.mark.parametrize("kind", ["Q4_1", "Q2_K", "Q4_K", "Q8_0"])
def test_scales_and_minimums_grow_as_those_of_merged_blocks_do(tmp_path: Path, kind: str) -> None:
    source, file = tiny_gguf("llama", kind).write(tmp_path / "m.gguf"), tmp_path / "a.safetensors"
    inputs = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    with open_checkpoint(source) as opened, torch.no_grad():
        decoder, digest = TorchDecoder(opened), opened.digest(ignore_progress)
        plain = decoder.product("layers.1.down", inputs)
        for value in decoder.parameters.values():
            value.add_(torch.linspace(-0.2, 0.2, value.numel()).reshape(value.shape))
        changes = decoder.changes()
        decoder.load(changes)
        result = decoder.product("layers.1.down", inputs)
    Alignment(Origin("m", digest, "t", 1, 0.0, 1.0, {}), changes).write(file)
    with open_aligned(source, file) as aligned:
        expected = inputs @ torch.from_numpy(aligned.values("layers.1.down")).T
    assert torch.linalg.norm(result - expected) < 2e-3 * torch.linalg.norm(expected)
    assert torch.linalg.norm(result - plain) > 0.05 * torch.linalg.norm(plain)


def test_losses_and_right_guesses_are_the_logits(source: Path) -> None:
    text = _texts(1)[0]
    with open_checkpoint(source) as opened:
        decoder = TorchDecoder(opened)
    logits = _logits(decoder, list(text.tokens[:-1]))[text.start - 1 :].astype(np.float64)
    labels = np.array(text.tokens[text.start :])
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    batch = batch_of([text, Text((1, 2, 3), 1)])
    np.testing.assert_allclose(decoder.losses(batch).detach().numpy()[: len(labels)], expected, rtol=1e-4)
    assert decoder.right(batch).tolist()[: len(labels)] == (logits.argmax(axis=1) == labels).tolist()


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "MXFP4"])
def test_training_makes_guesses_right_and_the_file_keeps_it(tmp_path: Path, kind: str) -> None:
    options = replace(OPTIONS, rate=0.1 if kind == "MXFP4" else 0.02, passes=12)  # of which gains alone learn
    source = tiny_gguf("llama", kind).write(tmp_path / "m.gguf")
    texts, file = _texts(), tmp_path / "a.safetensors"
    with open_checkpoint(source) as opened:
        digest, decoder = opened.digest(ignore_progress), TorchDecoder(opened, rank=4)
        before = count_right(decoder, texts)
        train(decoder, texts, options)
        changes = decoder.changes()
        decoder.load(changes)
        after = count_right(decoder, texts)
    assert before.keys() == after.keys() == {"even", "odd"}
    assert sum(right for right, _ in before.values()) < 12
    assert all(right > 0.3 * of for right, of in after.values())
    assert Alignment(Origin("m", digest, "t", 1, 0.0, 1.0, {}), changes).write(file) < 60_000
    with open_aligned(source, file) as aligned:  # a plain decoder over merged weights guesses the same
        assert count_right(TorchDecoder(aligned), texts) == after


class _StopError(Exception):
    pass


def test_a_run_that_was_stopped_ends_where_one_ends_that_was_not(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SAVE_S", 0.0)
    texts, file = _texts(), tmp_path / "training.pt"

    def stop(report: Progress) -> None:
        if report.stage == "Training" and report.done == 3:
            raise _StopError

    with open_checkpoint(source) as opened:
        whole = TorchDecoder(opened)
        assert train(whole, texts, OPTIONS) > 3
        with pytest.raises(_StopError):
            train(TorchDecoder(opened), texts, OPTIONS, file=file, progress=stop)
        again = TorchDecoder(opened)
        seen: list[int] = []
        train(again, texts, OPTIONS, file=file, progress=lambda report: seen.append(report.done))
    assert seen[0] == 3
    for name, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[name])


def test_another_runs_state_is_refused(tmp_path: Path, source: Path) -> None:
    texts, file = _texts(6), tmp_path / "training.pt"
    with open_checkpoint(source) as opened:
        decoder = TorchDecoder(opened)
        train(decoder, texts, OPTIONS, file=file)
        for other, known in ((_texts(7), ""), (texts[::-1], ""), (texts, "another drafter")):
            with pytest.raises(RequestError, match="another training run"):
                train(decoder, other, OPTIONS, file=file, known=known)
        data = file.read_bytes()
        for end in (0, 10, len(data) // 2):
            file.write_bytes(data[:end])
            with pytest.raises(RequestError, match="damaged"):
                train(decoder, texts, OPTIONS, file=file)


def test_a_loss_that_runs_away_ends_the_training(source: Path) -> None:
    with open_checkpoint(source) as opened:
        decoder = TorchDecoder(opened)
        decoder.parameters["final_norm"].data.fill_(torch.inf)
        with pytest.raises(RequestError, match="lower one with --rate"):
            train(decoder, _texts(6), OPTIONS)


def test_batches_hold_every_text_once_a_pass_and_stay_small() -> None:
    texts = _texts(50)
    batches = training.batches_of(texts, replace(OPTIONS, passes=2))
    flat = [text for batch in batches for text in batch]
    assert sorted(flat, key=repr) == sorted(texts * 2, key=repr)
    assert all(len(batch) * max(len(text.tokens) for text in batch) <= 64 for batch in batches)
    assert training.batches_of(texts, replace(OPTIONS, seed=1)) != training.batches_of(texts, OPTIONS)


def test_the_command_from_prompts_to_a_bundle(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, loads: Callable[[Any], None]
) -> None:
    bundle, out = tmp_path / "plain", tmp_path / "aligned"
    runner = CliRunner()
    exported = ["export", str(source), "--role", "drafter", "--trim-vocab", "full", "-o"]
    assert runner.invoke(app, [*exported, str(bundle)]).exit_code == 0
    prompts = tmp_path / "prompts.jsonl"
    lines = (f'{{"id": "p{i}", "category": "c", "turns": ["question {i}"]}}\n' for i in range(60))
    prompts.write_text("".join(lines), encoding="utf-8")
    loads(lambda *names, **settings: FakeModel())
    for opener in ("edgespec.align.answering.open_model", "edgespec.loading.opening.open_model"):
        monkeypatch.setattr(opener, lambda *names, **settings: Bundle(bundle))
    monkeypatch.setattr(answering, "check_target", lambda _: None)
    command = ["align", str(source), "--target", "t", "--prompts", str(prompts), "-o", str(out)]
    command += ["--rate", "0.02", "--batch-tokens", "64", "--device", "cpu"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0 and "right first guesses" in result.stdout, result.output
    file = out / "alignment.safetensors"
    origin = read_alignment(file).origin
    assert (origin.model, origin.target) == ("m.gguf", "t")
    assert origin.right_after > origin.right_before and origin.recipe["rate"] == "0.02"
    merged = runner.invoke(app, [*exported, str(tmp_path / "b"), "--alignment", str(file)])
    assert merged.exit_code == 0, merged.output
    again = runner.invoke(app, [*command, "--json"])  # all there: nothing is asked or trained again
    assert again.exit_code == 0 and '"steps"' in again.stdout


def test_too_few_answers_and_no_gpu_are_said(tmp_path: Path, source: Path) -> None:
    texts, facts = (_texts(30), _texts(0)), {"model": "m", "target": "t", "licence": ""}
    with pytest.raises(RequestError, match="0 held out"):
        running.align(source, texts, OPTIONS, tmp_path, device="cpu", facts=facts, progress=ignore_progress)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            running.torch_device("cuda")
