"""Models and requests for the tests of drafting ahead."""

from collections.abc import Sequence

from edgespec.drafting.ahead import Ahead
from edgespec.drafting.bridge import Bridge, IdentityBridge
from edgespec.drafting.draft import NO_DRAFT
from edgespec.drafting.guard import Guard
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.generation import Job
from edgespec.pricing import Pricing
from edgespec.request import Request
from edgespec.sampling import SamplingParams
from edgespec.verification import make_verifier
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import PROFILES
from edgespec_runtimes.discovery import Device, State
from edgespec_runtimes.placement import Placement
from edgespec_runtimes.predictions import Predictions
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import F32, Law, ToySession

VOCAB = 50
PROMPT = [3, 1, 4]
QUICK = CostCurve({1: 1e-3})


def plain(law: Law, count: int, params: SamplingParams | None = None) -> list[int]:
    tokens, verify = list(PROMPT), make_verifier(params or SamplingParams())
    for _ in range(count):
        tokens.append(verify(Predictions(law(tokens)[None]), NO_DRAFT, tokens).token)
    return tokens


def drafter_of(
    session: ToySession,
    ahead: Ahead | None,
    pricing: Pricing,
    bridge: Bridge | None = None,
    curve: CostCurve = QUICK,
) -> ModelDrafter:
    return ModelDrafter(
        session,
        bridge or IdentityBridge(VOCAB),
        Vocabulary(),
        pricing=pricing,
        calibration=Calibration(),
        curve=curve,
        ahead=ahead,
    )


def mixed(law: Law, other: Law, right: float) -> Law:
    """``law`` in a share of all places, ``other`` elsewhere."""

    def law_here(tokens: Sequence[int]) -> F32:
        return (law if hash(tuple(tokens[-4:])) % 1000 < 1000 * right else other)(tokens)

    return law_here


def job_of(
    target: ToySession, drafter: ModelDrafter, ahead: Ahead | None, pricing: Pricing, request: Request
) -> Job:
    return Job(
        session=target,
        tokenizer=Tokenizer.from_json(byte_level_json()),
        drafter=drafter,
        tokens=list(PROMPT),
        request=request,
        eos=frozenset(),
        max_draft=4,
        pricing=pricing,
        guard=Guard(pricing),
        off_reason=None,
        ahead=ahead,
    )


def placed(name: str, state: State = "ready") -> Placement:
    return Placement(Device(PROFILES[name], state), "made up")
