"""The drafter's half of a loaded model: what it keeps between requests, and a drafter for each of them."""

from collections.abc import Callable, Sequence

from edgespec.drafting.ahead import Ahead
from edgespec.drafting.bridge import Bridge, ByteBridge, IdentityBridge
from edgespec.drafting.context import context_tokens
from edgespec.drafting.experience import Experience
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.learning.correction import Correction
from edgespec.pricing import Pricing
from edgespec.request import Request
from edgespec.sessions import DRAFTER_READING_ROWS, Running
from edgespec_models.bundle import Bundle

__all__ = ["DrafterSide"]


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
        correction: what it learned of its user, and learns; None guesses as the model does.
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
        self.correction: Correction | None = None
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
            correction=self.correction,
        )
        self.experience.begin(tokens, lambda: drafter.gain_s and drafter.gain_s / longest_s)
        return drafter, reading_s

    def _vocabulary(self, prompt: Sequence[int], request: Request) -> Vocabulary:
        """What it can write in this request: besides the rows it has, the words of its prompt."""
        if self.bundle.head_tokens is not None:
            kept = context_tokens(prompt, self.bundle.tokenizer, self.bundle.head_tokens)
            self.session.offer(kept)
        eos = self._target.manifest.special_tokens.eos if request.stop_at_eos else ()
        ends = frozenset(self.bundle.manifest.special_tokens.eos)
        return Vocabulary(ends, eos[0] if eos else None, self.session.head_tokens)
