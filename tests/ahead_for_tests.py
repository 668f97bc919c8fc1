"""Models and requests for the tests of drafting ahead."""

from collections.abc import Sequence
from time import perf_counter

from edgespec.decoding.draft import NO_DRAFT, Clock, Remarks
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verification import make_verifier
from edgespec.drafting.ahead import Ahead, Beside
from edgespec.drafting.bridge import Bridge, IdentityBridge
from edgespec.drafting.guard import Guard
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Reader
from edgespec.requests.generation import PreparedRequest
from edgespec.requests.request import Request
from edgespec.requests.stream import Stream
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices.discovery import Device, State
from edgespec_runtimes.devices.kinds import KINDS
from edgespec_runtimes.devices.placement import Placement
from edgespec_runtimes.predictions import Predictions
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import F32, NextLogits, Silent, ToySession, stream_over

VOCAB = 50
PROMPT = [3, 1, 4]
QUICK = CostCurve({1: 1e-3})


def plain(next_logits: NextLogits, count: int, params: SamplingParams | None = None) -> list[int]:
    tokens, verify = list(PROMPT), make_verifier(params or SamplingParams())
    for _ in range(count):
        tokens.append(verify(Predictions(next_logits(tokens)[None]), NO_DRAFT, tokens).token)
    return tokens


def model_of(
    session: ToySession,
    pricing: Pricing,
    bridge: Bridge | None = None,
    curve: CostCurve = QUICK,
    clock: Clock = perf_counter,
) -> ModelDrafter:
    return ModelDrafter(
        Reader(session, curve, clock=clock),
        bridge or IdentityBridge(VOCAB),
        Vocabulary(),
        pricing=pricing,
        calibration=Calibration(),
    )


def ahead_of(model: ModelDrafter, beside: Beside, pricing: Pricing) -> Ahead:
    return Ahead(model, beside, pricing=pricing, remarks=Remarks())


def mixed(next_logits: NextLogits, other: NextLogits, right: float) -> NextLogits:
    """``next_logits`` in a share of all places, ``other`` elsewhere."""

    def law_here(tokens: Sequence[int]) -> F32:
        return (next_logits if hash(tuple(tokens[-4:])) % 1000 < 1000 * right else other)(tokens)

    return law_here


def stream_of(
    target: ToySession,
    model: ModelDrafter,
    beside: Beside | None,
    pricing: Pricing,
    request: Request,
    clock: Clock = perf_counter,
) -> Stream:
    """A request that drafts with a model alone."""

    def begin() -> Policy:
        remarks, source = Remarks(), model if beside is None else None
        ahead = None if beside is None else Ahead(model, beside, pricing=pricing, remarks=remarks)
        return Policy(Silent(), source or ahead, pricing=pricing, guard=Guard(pricing), remarks=remarks)

    return stream_over(
        PreparedRequest(
            session=target,
            tokenizer=Tokenizer.from_json(byte_level_json()),
            tokens=list(PROMPT),
            request=request,
            eos=frozenset(),
            max_draft=4,
            begin=begin,
            clock=clock,
        )
    )


def placed(name: str, state: State = "ready") -> Placement:
    return Placement(Device(KINDS[name], state), "made up")
