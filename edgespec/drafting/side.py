"""The drafter's half of a loaded model: what it keeps between requests, and its part in each request."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from edgespec.drafting.bridge import Bridge, ByteBridge, IdentityBridge
from edgespec.drafting.cascade import Followers
from edgespec.drafting.model import Calibration, ModelDrafter, context_tokens
from edgespec.drafting.pricing import USUAL_TOKENS
from edgespec.drafting.rates import Rate
from edgespec.drafting.reading import Chain, Reader
from edgespec.drafting.source import Source
from edgespec.loading.opening import DRAFTER_READING_ROWS, TimedModel
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import Session

if TYPE_CHECKING:
    from edgespec.drafting.heads import AddPictures

_READING = 1.0  # times a token of plain decoding that reading a prompt may take
_LEAST_READ, _FIRST = 32, 4  # tokens of a prompt: of its end, and of its beginning
_EARLIEST = 2  # tokens of an answer; one of one word is over by then
_GAIN = 0.15  # of an answer's time, which drafting saves at least where it pays to read for it


class DrafterSide:
    """The drafter of a target: a model that reads the text, or a head that reads the target's states."""

    def __init__(
        self, target: Bundle, running: TimedModel, *, same_vocabulary: bool, caches: KvStore
    ) -> None:
        self.bundle, self.session, self.curve = running.bundle, running.session, running.curve
        self._row_s = running.curve.seconds(DRAFTER_READING_ROWS) / DRAFTER_READING_ROWS  # of a prompt
        self._target, self._same_vocabulary, self._caches = target, same_vocabulary, caches
        self.calibration = Calibration()
        self._rates = list[Rate]()  # of a head that drafts blocks
        self._followers = Followers(running.curve)
        self._words: dict[Session, list[int]] = {}  # that a trimmed LM head is offered, by request

    def prompt(self, tokens: list[int], encode: Callable[[Bundle], list[int]]) -> list[int]:
        """``tokens``, the prompt, as the drafter is to read it: in its own tokens and chat template.

        A head reads no prompt of its own.
        """
        if self.bundle.config.is_head:
            return []
        return tokens.copy() if self._same_vocabulary else encode(self.bundle)

    def begin(
        self,
        tokens: Sequence[int],
        prompt: list[int],
        sessions: tuple[Session, Sequence[Session]],
        *,
        target: Session,
        max_new_tokens: int,
        max_draft: int,
        target_end: int | None,
        token_s: float,
        add_pictures: "AddPictures | None" = None,
    ) -> Source | None:
        """The source of a new request; None if its answer cannot be long enough.

        ``prompt`` is ``tokens`` as the drafter reads them. It reads with the first of ``sessions``; the other
        sessions belong to running requests. ``target`` is the target's; ``target_end`` is its token to
        propose where the drafter ends the text. Plain decoding takes ``token_s`` seconds a token. With
        ``add_pictures`` a head sees the pictures of the prompt.
        """
        session, others = sessions
        if self.bundle.config.is_head:
            self._offer(session, others, tokens)
            room = max_new_tokens + 4 * max_draft
            return self._head(session, target, len(tokens), room, add_pictures)
        self._caches.fetch(session, prompt, others, on_disk=False)  # it reads little
        held = session.shared_prefix(prompt)
        # Of a long prompt it reads the end, besides what its cache holds and the first tokens, on which
        # attention rests (StreamingLLM, arXiv 2309.17453).
        begin = max(held, _FIRST)
        left_out = begin, max(begin, len(prompt) - max(_LEAST_READ, int(_READING * token_s / self._row_s)))
        length = len(prompt) - left_out[1] + begin
        # Another vocabulary may need more tokens for the same text.
        session.reserve(min(length + 2 * max_new_tokens + 4 * max_draft, session.model.longest))
        reading_s, longest_s = (length - held) * self._row_s, min(max_new_tokens, USUAL_TOKENS) * token_s
        if length >= session.capacity or reading_s >= _GAIN * longest_s:
            return None
        bridge, reader = self._bridge(tokens, prompt), Reader(session, self.curve, self._followers, held=held)
        self._offer(session, others, prompt)
        return ModelDrafter(
            reader,
            bridge,
            ends=self.bundle.manifest.special_tokens.eos,
            target_end=target_end,
            calibration=self.calibration,
            left_out=left_out,
            earliest=_EARLIEST,
        )

    def forget(self) -> None:
        """Forget all texts that it read, except in its KV caches."""
        self._followers.forget()
        self._words.clear()

    def _head(
        self, session: Session, target: Session, length: int, room: int, add_pictures: "AddPictures | None"
    ) -> Source:
        """The source that drafts with a head behind a prompt of ``length`` tokens.

        ``room`` is the number of tokens that the request may add.
        """
        from edgespec.drafting.heads import MOST_READ, AssistantReader, HeadReader

        config, block = self.bundle.config, session.model.config.block
        calibration = self.calibration
        reader: Chain
        if config.reads_cache:
            reader = AssistantReader(session, self.curve, length, target)
        else:
            session.reserve(min(MOST_READ + room, session.model.longest))
            if block is not None:
                from edgespec.drafting.blocks import BlockDrafter, usual_rates

                self._rates = self._rates or usual_rates(block.longest)
                return BlockDrafter(session, self.curve, length, calibration=calibration, rates=self._rates)
            reader = HeadReader(session, self.curve, length, add_pictures)
        bridge = IdentityBridge(config.vocab_size)
        return ModelDrafter(reader, bridge, calibration=calibration)

    def _bridge(self, tokens: Sequence[int], prompt: list[int]) -> Bridge:
        if self._same_vocabulary:
            return IdentityBridge(self._target.config.vocab_size, self.bundle.config.vocab_size)
        tokenizers = self._target.tokenizer, self.bundle.tokenizer
        return ByteBridge(*tokenizers, prompt_length=len(tokens), drafter_prompt=prompt)

    def _offer(self, session: Session, others: Sequence[Session], prompt: Sequence[int]) -> None:
        """Let a trimmed LM head also write the words of the prompts that are being answered."""
        if self.bundle.head_tokens is None:
            return
        words = {other: self._words[other] for other in others if other in self._words}
        words[session] = context_tokens(prompt, self.bundle.tokenizer, self.bundle.head_tokens)
        self._words = words
        session.model.offer(list(dict.fromkeys(chain.from_iterable(words.values()))))
