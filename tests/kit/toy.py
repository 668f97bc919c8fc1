"""Sessions without weights and bundles with random ones, for tests of everything above them."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.answering.answer import Answer
from edgespec.asking.request import PromptTokens, Request
from edgespec.decoding.draft import NO_DRAFT, Clock, Draft, Passed, Round
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Prices, Pricing
from edgespec.drafting.source import Extending, Source, Wanted
from edgespec.running import sequence as requests
from edgespec.running.ticket import Ticket
from edgespec.running.verifier import Verifier
from edgespec_models.bundles.bundle import (
    GRAPH,
    HEAD_TOKENS,
    MANIFEST,
    TEMPLATE,
    TOKENIZER,
    Bundle,
    FileRecord,
    Manifest,
)
from edgespec_models.bundles.graph_contract import Part
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders import transformer
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.decoders.operations import Rope
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import SLIDING, Transformer
from edgespec_models.families.gemma3 import Gemma3
from edgespec_models.graphs.decoder import build_decoder
from edgespec_models.graphs.plan import FULL, Precision
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.kv_cache import Saved, Stretch
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import LoadedModel, Rows, Session
from tests.kit.tokenizers import byte_level_json
from tests.kit.weights import filled, tiny_plan

F32 = npt.NDArray[np.float32]
NextLogits = Callable[[Sequence[int]], F32]

FLOAT = WeightFormat(32)
INT8 = WeightFormat(8, 32)
INT4 = WeightFormat(4, 32)
COLUMNS = WeightFormat(4, 32, minimums=True)

PRICES = Pricing(CostCurve({1: 1.0, 32: 1.0001})).at()
"""Verification costs next to nothing, so everything likely enough is drafted."""
KV_BYTES = 8
"""What a token takes in the cache of a toy."""

LLAMA = Transformer(
    architecture="llama",
    vocab_size=404,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_epsilon=1e-5,
    context_length=640,
    rope=Rope(theta=10_000.0, width=32, pairs=16, interleaved=True),
    attention_scale=32**-0.5,
)
WIDE = replace(LLAMA, hidden_size=128, intermediate_size=256)
"""Of whole blocks of 128."""
GEMMA = LLAMA.become(
    Gemma3,
    architecture="gemma3",
    rope=Rope(theta=1_000_000.0, width=32, pairs=16),
    local_rope=Rope(name="rope_local", theta=10_000.0, width=32, pairs=16),
    sliding_window=6,
    layer_types=(SLIDING, transformer.FULL),
    embedding_scale=96**0.5,
    attention_scale=0.25,
)
HALVES = replace(LLAMA.rope, interleaved=False)
QWEN = replace(LLAMA, architecture="qwen2", rope=HALVES)


def markov_logits(seed: int, vocab_size: int, *, scale: float = 2.0) -> NextLogits:
    """Logits that depend on the last two tokens and on the position: a wrong cache shows at once."""
    rng = np.random.default_rng(seed)
    last, before, position = rng.normal(0.0, scale, (3, max(vocab_size, 7), vocab_size)).astype(np.float32)

    def next_logits(tokens: Sequence[int]) -> F32:
        row = last[tokens[-1]] + 0.3 * position[len(tokens) % 7]
        logits: F32 = row + 0.5 * before[tokens[-2]] if len(tokens) > 1 else row
        return logits

    return next_logits


def script_logits(tokenizer: Tokenizer, script: bytes, start: int) -> NextLogits:
    """The model that writes ``script``, again and again, behind ``start`` tokens of prompt.

    Where the tokens so far do not follow the script it goes on with the script's place for that length.
    """
    twice = script * 2

    def next_logits(tokens: Sequence[int]) -> F32:
        at = len(tokenizer.bytes_of(tokens[start:])) % len(script)
        logits = np.zeros(tokenizer.vocab_size, np.float32)
        logits[tokenizer.encode_bytes(twice[at : at + 40])[0]] = 9.0
        return logits

    return next_logits


class ToyModel(LoadedModel):
    """What toy sessions have in common.

    Attributes:
        kind: of further sessions.
        width: numbers that are kept of a token.
        passes: rows of every pass.
        closed: whether it is.
    """

    row_exact = True
    width = 1
    kind: "type[ToySession]"

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        context: int = 4096,
        chunk: int = 8,
        several: bool = False,
    ) -> None:
        shape = DecoderShape(architecture="toy", vocab_size=vocab_size, num_layers=1, context_length=context)
        super().__init__(shape, chunk=chunk)
        self.next_logits, self.takes_several, self.most_rows = next_logits, several, context
        self.kind, self.passes, self.closed = ToySession, list[int](), False

    @property
    def block_bytes(self) -> int:
        return KV_BYTES * BLOCK * self.width

    @property
    def kv_bytes(self) -> int:
        return KV_BYTES * sum(stretch.capacity for stretch in self.stretches)

    def session(self) -> "ToySession":
        return self.kind(self.next_logits, self.vocab_size, model=self)

    def rounded(self, capacity: int) -> int:
        return capacity

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        return cast(ToySession, rows[0].session).pass_over(rows)

    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        raise AssertionError("a toy's sessions compute their rows themselves")

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class ToySession(Session):
    """A :class:`~edgespec_runtimes.session.Session` over next_logits, of a model of its own if none is given.

    Attributes:
        model: the toy that it is a session of.
    """

    model: ToyModel

    def __init__(
        self,
        next_logits: NextLogits | None = None,
        vocab_size: int = 0,
        *,
        model: ToyModel | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            assert next_logits is not None
            model = ToyModel(next_logits, vocab_size, **options)
        super().__init__(model)
        self._buffer = np.zeros((128, model.vocab_size), np.float32)

    @property
    def cache(self) -> list[int]:
        """The tokens whose keys and values a model would hold."""
        return self.stretch.tokens

    @property
    def passes(self) -> list[int]:
        """Rows of every pass of the model."""
        return self.model.passes

    @classmethod
    def markov(cls, seed: int, vocab_size: int, *, scale: float = 2.0) -> "ToySession":
        return cls(markov_logits(seed, vocab_size, scale=scale), vocab_size)

    @classmethod
    def writing(cls, tokenizer: Tokenizer, script: bytes, start: int) -> "ToySession":
        return cls(script_logits(tokenizer, script, start), tokenizer.vocab_size)

    def save(self, at: int) -> Saved | None:
        assert 0 <= at * BLOCK < len(self.cache)
        return memoryview(np.array(self.cache[at * BLOCK : (at + 1) * BLOCK], np.int64).tobytes())

    def append(self, tokens: Sequence[int], saved: Saved) -> None:
        assert len(self.cache) % BLOCK == 0
        self.reserve(len(self.cache) + len(tokens))
        self.stretch.add(np.frombuffer(bytes(saved), np.int64)[: len(tokens)].tolist())

    def predict(self, tokens: Sequence[int]) -> Predictions:
        return Predictions(self.forward(tokens))

    def pass_over(self, rows: Sequence[Rows]) -> list[Predictions]:
        """A pass over rows of sessions of the model."""
        outputs = [row.session.predict(row.tokens).logits for row in rows]
        self.passes[-len(rows) :] = [sum(self.passes[-len(rows) :])]  # which were one
        return [
            Predictions(logits[len(logits) - row.wanted :]) for logits, row in zip(outputs, rows, strict=True)
        ]

    def forward(self, tokens: Sequence[int]) -> F32:
        """A pass: the logits of every row."""
        assert not self.closed and len(tokens) > 0
        assert all(0 <= token < self.model.vocab_size for token in tokens)
        self.reserve(self.length + len(tokens))
        self.passes.append(len(tokens))
        text = list(self.cache)
        for row, token in enumerate(tokens):
            text.append(token)
            self._buffer[row] = self.model.next_logits(text)
        self.stretch.add(tokens, fresh=len(tokens))
        return self._buffer[: len(tokens)]

    def release(self) -> int:
        freed = self.kv_bytes
        self.rewind(0)
        self.stretch.capacity = 0
        return freed


def alone(
    wanted: Wanted, take: Callable[[Predictions, Passed], Wanted], clock: Clock = perf_counter
) -> Draft | None:
    """Have all rows read that are wanted, each time in a pass of their own; returns what came of it."""
    while isinstance(wanted, Rows):
        began = clock()
        (predictions,) = wanted.session.model.predict_together([wanted])
        seconds = clock() - began
        wanted = take(predictions, Passed(len(wanted.tokens), seconds, seconds))
    return wanted


def decode(
    target: Session,
    source: Source | Extending | Policy,
    verify: Verifier,
    tokens: list[int],
    *,
    clock: Clock = perf_counter,
    prices: Prices = PRICES,
    **options: Any,
) -> Iterator[Round]:
    """All rounds of one request that has the target for itself."""
    one = loop_of(target, in_loop(source), verify, tokens, clock=clock, **options)
    while one.reason is None:
        alone(one.propose(prices), one.take, clock)
        rows, began = one.rows(target.model.piece, len(one.draft.tokens)), clock()
        (outputs,) = target.model.predict_together([rows])
        passed = clock() - began
        round_ = one.commit(outputs, Passed(len(rows.tokens), passed, passed))
        if round_ is not None:
            yield round_


def loop_of(
    target: Session,
    policy: Policy,
    verify: Verifier,
    tokens: list[int],
    clock: Clock = perf_counter,
    **options: Any,
) -> requests.Sequence:
    """The loop of a request that nobody has asked for, without text."""
    seat = requests.Seat(target, None, KvStore(0))
    answer = cast(Answer, SimpleNamespace(tokens=tokens, clock=clock, read=len))
    names, top = ("max_draft", "stop", "checkpoints"), options.get("top_logprobs")
    limits = {name: options[name] for name in names if name in options}
    request = Request(
        max_new_tokens=options["max_new_tokens"], logprobs=top is not None, top_logprobs=top or 0
    )
    ticket = cast(Ticket, SimpleNamespace(request=request, prompt=PromptTokens([], [], None)))
    return requests.Sequence(ticket, seat, policy, verify, answer, **limits)


def until(happened: Callable[[], object]) -> None:
    end = monotonic() + 60
    while not happened():
        assert monotonic() < end, "it never happened"
        sleep(0.001)


def settle() -> None:
    """Wait until no worker has anything to do."""
    for thread in threading.enumerate():
        if thread.name == "edgespec-model":
            thread.join(60)
            assert not thread.is_alive()


def in_loop(source: Source | Extending | Policy) -> Policy:
    """A policy, or one that asks a single source in every round."""
    return source if isinstance(source, Policy) else cast(Policy, Single(source))


class Single:
    """In place of a policy: it has one source."""

    def __init__(self, source: Source | Extending) -> None:
        self.source = source

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Rows | Draft:
        if hasattr(self.source, "begin"):
            return cast(Source, self.source).begin(tokens, limit, prices) or NO_DRAFT
        return self.source.propose(tokens, limit)

    def take(self, predictions: Predictions, passed: Passed) -> Rows | Draft:
        return cast(Source, self.source).take(predictions, passed) or NO_DRAFT

    def observe(self, round_: Round) -> None:
        self.source.observe(round_)

    def close(self) -> None:
        self.source.close()


class Deaf(Source):
    """A source of the loop and a free one, which learns nothing, and goes on behind nothing."""

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Draft:
        return self.propose(tokens, limit)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return NO_DRAFT

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        return draft

    def observe(self, round_: Round) -> None:
        pass

    def close(self) -> None:
        pass


class Silent(Deaf):
    """Proposes nothing."""


def round_of(*tokens: int, draft: Draft = NO_DRAFT, accepted: int = 0) -> Round:
    """A round that took no time."""
    return Round(tokens, draft, accepted)


class RandomDrafter(Deaf):
    """Proposes anything, seldom what the target would write; with or without an oracle's help.

    What it proposes is a function of the tokens, as deterministic proposals must be.
    """

    def __init__(self, seed: int, vocab_size: int, oracle: NextLogits | None = None) -> None:
        self._seed, self._vocab_size, self._oracle = seed, vocab_size, oracle

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        digest = hashlib.sha256(repr((self._seed, list(tokens))).encode()).digest()
        rng = np.random.default_rng(list(digest))
        drafted: list[int] = []
        for _ in range(int(rng.integers(0, limit + 1))):
            if self._oracle is not None and rng.random() < 0.7:
                drafted.append(int(self._oracle([*tokens, *drafted]).argmax()))
            else:
                drafted.append(int(rng.integers(self._vocab_size)))
        sources = ("random",) * len(drafted)
        return Draft(tuple(drafted), sources, tuple(rng.random(len(drafted)).tolist()))


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A random model on disk, and the float32 values its weights stand for, by parameter prefix."""

    path: Path
    config: Transformer
    weights: dict[str, F32]

    @property
    def bundle(self) -> Bundle:
        return Bundle(self.path)


def tiny_bundle(
    folder: Path,
    config: Transformer = LLAMA,
    form: WeightFormat = FLOAT,
    *,
    tokenizer_json: str | None = None,
    seed: int = 0,
    precision: Precision = FULL,
    role: Literal["target", "drafter"] = "target",
    head_tokens: tuple[int, ...] | None = None,
) -> TinyModel:
    """Build a random model of ``config``, every projection in ``form``, in the new directory ``folder``.

    Its LM head may be trimmed to ``head_tokens``.
    """
    plan = tiny_plan(config, form, precision=precision, head_tokens=head_tokens)
    model = build_decoder(config, plan)
    weights = filled(model, config, plan, np.random.default_rng(seed))
    facts = {
        "weights": "portable",
        "formats": {form.name: 1},
        "kept": record(config).kept_in(precision.activations),
        "activations": precision.activations,
        "device": None if precision == FULL else "cuda",
        "choices": plan.choices,
    }
    write_bundle(folder, model, config, head_tokens, tokenizer_json, facts | {"role": role})
    return TinyModel(folder, config, weights)


def write_bundle(
    folder: Path,
    model: ir.Model,
    config: Transformer,
    head_tokens: tuple[int, ...] | None,
    tokenizer_json: str | None,
    facts: Mapping[str, Any],
    template: str | None = None,
) -> None:
    """A bundle of ``model``, whose parameters are filled; ``facts`` are the manifest's."""
    folder.mkdir(parents=True)
    text = tokenizer_json or byte_level_json()
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    if head_tokens is not None:
        np.save(folder / HEAD_TOKENS, np.array(head_tokens, np.int32))
    # As in exports, all weights are external, and only the graph's own constants are not.
    ir.save(model, folder / GRAPH, external_data=f"{GRAPH}.data", size_threshold_bytes=48)
    eos = Tokenizer.from_json(text).special_id("<|im_end|>")
    manifest = Manifest(
        name=folder.name,
        config=config,
        bytes_by_class=dict.fromkeys(("embedding", "attention", "mlp", "lm_head", "other"), 1000),
        parameters_by_class=dict.fromkeys(("embedding", "attention", "mlp", "lm_head", "other"), 1000),
        special_tokens=SpecialTokens(None, () if eos is None else (eos,), add_bos=False),
        provenance={"source": "random"},
        head_rows=None if head_tokens is None else len(head_tokens),
        files={file.name: FileRecord.of(file) for file in sorted(folder.iterdir())},
        **facts,
    )
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()), encoding="utf-8")
