"""The drafter's half of a loaded model: what it keeps between requests, and a drafter for each of them."""

from collections.abc import Callable, Sequence

from edgespec.drafting.ahead import Ahead
from edgespec.drafting.bridge import Bridge, ByteBridge, IdentityBridge
from edgespec.drafting.context import context_tokens
from edgespec.drafting.experience import Experience
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.learning.decoder import NumpyDecoder
from edgespec.learning.layer_math import F32
from edgespec.learning.lesson import Table
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Example, Tuning
from edgespec.pricing import Pricing
from edgespec.request import Request
from edgespec.sessions import DRAFTER_READING_ROWS, Running
from edgespec_models.bundle import Bundle
from edgespec_models.errors import TokenizerError

__all__ = ["DrafterSide"]

_PROMPT, _ANSWER = 256, 512  # tokens of a text to learn from, at most: its prompt's last, its answer's first
_SHORTEST = 8  # answer
_REREAD = 64  # tokens that may be read again; system prompts are mostly shorter


class DrafterSide:
    """A drafter beside its target. One request at a time.

    Args:
        target: the target's bundle.
        bundle: the drafter's.
        running: the drafter's session, and what its passes cost.
        same_vocabulary: whether both have the same tokens.
        pricing: what verification costs.
        ahead: lets it draft on while the target's pass runs; None where both run on one device.

    Attributes:
        bundle: as given.
        session: the drafter's.
        curve: its measured T(n).
        ahead: as given.
        experience: whether reading prompts paid, by how they began.
        trainer: teaches it what the target writes; None leaves it as it is.
    """

    def __init__(
        self,
        target: Bundle,
        bundle: Bundle,
        running: Running,
        *,
        same_vocabulary: bool,
        pricing: Pricing,
        ahead: Ahead | None = None,
    ) -> None:
        self.bundle, self.session, self.curve, self.ahead = bundle, running.session, running.curve, ahead
        self.experience = Experience()
        self.trainer: Trainer | None = None
        self._gains: dict[str, F32] | None = None  # trained, to run with
        self._read: tuple[Bridge, int] | None = None  # this request's bridge, and tokens of its prompt
        self._target, self._same_vocabulary, self._pricing = target, same_vocabulary, pricing
        self._calibration = Calibration()

    def drafter(
        self,
        tokens: Sequence[int],
        prompt_of: Callable[[Bundle], list[int]],
        request: Request,
        *,
        max_draft: int,
    ) -> tuple[ModelDrafter | None, float]:
        """The drafter for one request and the seconds of its reading; None if that will not pay.

        Args:
            tokens: the prompt, in the target's tokens.
            prompt_of: the prompt in a bundle's own tokens and chat template.
            request: what is asked.
            max_draft: the longest draft.
        """
        self._read = None
        bridge: Bridge
        if self._same_vocabulary:
            prompt, bridge = list(tokens), IdentityBridge(self._target.config.vocab_size)
        else:
            prompt = prompt_of(self.bundle)
            tokenizers = self._target.tokenizer, self.bundle.tokenizer
            bridge = ByteBridge(*tokenizers, prompt_length=len(tokens), drafter_prompt=prompt)
        session = self.session
        # Another vocabulary may need more tokens for the same text.
        wanted = len(prompt) + 2 * request.max_new_tokens + 4 * max_draft
        session.reserve(min(wanted, session.longest))
        self._tune(prompt)
        unread = len(prompt) - session.shared_prefix(prompt)
        reading_s = unread * self.curve.seconds(DRAFTER_READING_ROWS) / DRAFTER_READING_ROWS
        longest_s = request.max_new_tokens * self._pricing.pass_seconds(1)
        if len(prompt) >= session.capacity or not self.experience.pays(tokens, reading_s / longest_s):
            return None, 0.0
        drafter = ModelDrafter(
            session,
            bridge,
            self._vocabulary(prompt, request),
            pricing=self._pricing,
            calibration=self._calibration,
            curve=self.curve,
            ahead=self.ahead,
        )
        self._read = bridge, len(prompt)
        self.experience.begin(tokens, lambda: drafter.gain_s and drafter.gain_s / longest_s)
        return drafter, reading_s

    def reset(self) -> None:
        """The last request has ended, or will never begin."""
        self._read = None
        if self.ahead is not None:
            self.ahead.begin()

    def teach(self, trainer: Trainer | None) -> None:
        """Let ``trainer`` train it; what another one taught is put back. None leaves it as the bundle is."""
        self.trainer, self._gains = trainer, None
        if self.trainable:
            self.session.tune({})

    @property
    def trainable(self) -> bool:
        """Whether what training changes can be changed in a session that runs."""
        return bool(self.session.tunable)

    def tuning(self, table: Table | None) -> Tuning:
        """What trains it, beginning with what is known.

        Raises:
            EdgespecError: its weights cannot be read.
        """
        return Tuning(NumpyDecoder(self.bundle), table)

    def begin(self) -> None:
        """A request runs from now on: training stands still."""
        if self.trainer is not None:
            self.trainer.pause()

    def end(self, tokens: Sequence[int]) -> None:
        """It has ended; ``tokens`` are its prompt and its answer, to be learned from."""
        if self.trainer is None:
            return
        self.trainer.resume()
        example = None if self._read is None else self._example(tokens, *self._read)
        self._read = None
        if example is not None:
            self.trainer.offer(example)

    def _example(self, tokens: Sequence[int], bridge: Bridge, start: int) -> Example | None:
        eos, ends = (bundle.manifest.special_tokens.eos for bundle in (self._target, self.bundle))
        ended = bool(tokens) and tokens[-1] in eos
        try:
            ids = bridge.align(tokens[:-1] if ended else tokens)
        except TokenizerError:  # what the drafter cannot spell, or its encoder fails over
            return None
        if ended and ends:
            ids = [*ids, ends[0]]
        if len(ids) - start < _SHORTEST:
            return None
        first = max(0, start - _PROMPT)
        return Example(tuple(ids[first : start + _ANSWER]), start - first)

    def _tune(self, prompt: Sequence[int]) -> None:
        """Run with what training found, unless much of ``prompt`` would have to be read again for it."""
        if self.trainer is not None:
            self._gains = self.trainer.take() or self._gains
        if self._gains is not None and self.session.shared_prefix(prompt) <= _REREAD:
            self.session.tune(self._gains)
            self._gains = None

    def _vocabulary(self, prompt: Sequence[int], request: Request) -> Vocabulary:
        """What it can write in this request: besides the rows it has, the words of its prompt."""
        if self.bundle.head_tokens is not None:
            kept = context_tokens(prompt, self.bundle.tokenizer, self.bundle.head_tokens)
            self.session.offer(kept)
        eos = self._target.manifest.special_tokens.eos if request.stop_at_eos else ()
        ends = frozenset(self.bundle.manifest.special_tokens.eos)
        return Vocabulary(ends, eos[0] if eos else None, self.session.head_tokens)
