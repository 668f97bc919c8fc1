"""Requests that are being answered: each round by round, and the rounds of all in one pass of the target."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TypeVar

from edgespec.decoding.draft import Passed
from edgespec.decoding.loop import Decoding
from edgespec.drafting.pricing import Pricing
from edgespec.requests.prepared import PreparedRequest
from edgespec.requests.worker import Answer, abandon
from edgespec_runtimes.kv_cache import shared_length
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

T = TypeVar("T")
_SHARE = 4  # of the rows that read prompts, so many parts: one is for the first


def take_turn(answers: Sequence[Answer], pricing: Pricing) -> None:
    """One pass over the next rows of all requests; who is over or fails is ended, and the others go on.

    ``pricing`` is told of how many requests the pass is, and chooses the rows of all their drafts.
    """
    pricing.sequences = max(1, len(answers))
    running = [
        (answer, one) for answer in answers if (one := _told(answer, partial(_go_on, answer, answers)))
    ]
    reading = sum(one.decoding.unread > 0 for _, one in running)
    pricing.sequences = max(1, len(running) - max(0, reading - 1))
    pricing.context = fmean(one.session.attended for _, one in running) if running else 0.0
    drafted = _drafted(running)
    if not drafted:
        return
    decodings = [one.decoding for _, one in drafted]
    counts = pricing.share([each.draft.confidence for each in decodings])
    for each, count in zip(decodings, counts, strict=True):
        each.draft = each.draft.head(count)
    beside = sum(1 + len(each.draft.tokens) for each in decodings if not each.unread)
    model, clock = drafted[0][1].session.model, drafted[0][1].clock
    rows = _rows(decodings, min(model.piece, pricing.piece(beside)) if beside else model.piece)
    drafted = [each for each, most in zip(drafted, rows, strict=True) if most]
    asked = [each.rows(most) for each, most in zip(decodings, rows, strict=True) if most]
    began = clock()
    try:
        said = model.predict_together(asked)
    except BaseException as error:  # noqa: BLE001 - raised where the answers are read
        for answer, _ in drafted:
            answer.finish(error)
        return
    passes = _shares(pricing, asked, clock() - began)
    for (answer, one), predictions, passed in zip(drafted, said, passes, strict=True):
        _told(answer, partial(_commit, answer, one, predictions, passed))


def _go_on(answer: Answer, answers: Sequence[Answer]) -> PreparedRequest | None:
    """The request, started if it is new; None if it is to end now, or to wait for what others read."""
    one = answer.prepared
    if one is None:
        if _is_being_read(answer, [each.prepared for each in answers if each.prepared and not each.result]):
            if answer.why_end() is not None:
                abandon(answer)
            return None
        is_full = any(not each.begun for each in answers)  # nobody overtakes one that has found no room
        waited_s, one = answer.queued_s, None if is_full else answer.prepare()
        answer.prepared = one
        if one is None:
            answer.postpone()
            return None
        one.start(waited_s)
        if (progress := one.progress) is not None:
            answer.put(progress)
    reason = answer.why_end()
    if reason is None:
        return one
    answer.put(one.stop(reason))
    answer.finish()
    return None


def _is_being_read(answer: Answer, others: Sequence[PreparedRequest]) -> bool:
    """Whether others read most of its prompt just now, so that it need not be read twice."""
    if answer.request.prompt_logprobs:  # for which it reads its prompt itself
        return False
    tokens, reading = answer.tokens(), [one for one in others if one.decoding.unread > 0]
    known = max((one.session.shared_prefix(tokens) for one in others), default=0)
    coming = max((shared_length(one.tokens, tokens) for one in reading), default=0) - known
    return coming > 0 and 2 * coming >= len(tokens) - known


def _rows(decodings: Sequence[Decoding], piece: int) -> list[int]:
    """How many rows each may have in a pass that reads ``piece`` tokens of prompts: the shortest goes first.

    A share is for the prompt that came first, so that it ends however many short ones come.
    """
    wanted = {
        at: each.unread + 1 + len(each.draft.tokens) for at, each in enumerate(decodings) if each.unread
    }
    rows, left = [0 if at in wanted else piece for at in range(len(decodings))], piece
    firsts = [(at, max(1, piece // _SHARE)) for at in [*wanted][:1]]
    for at, most in [*firsts, *((at, piece) for at in sorted(wanted, key=lambda at: wanted[at]))]:
        more = min(most, left, wanted[at] - rows[at])
        rows[at], left = rows[at] + more, left - more
    return rows


def _drafted(running: Sequence[tuple[Answer, PreparedRequest]]) -> list[tuple[Answer, PreparedRequest]]:
    """Those that have drafted; their drafters' steps share passes, as long as there are any to do."""
    for answer, one in running:
        _told(answer, one.decoding.propose)
    while waiting := [
        (answer, one.decoding, rows)
        for answer, one in running
        if answer.result is None and (rows := one.decoding.drafter_rows)
    ]:
        asked, clock = [rows for _, _, rows in waiting], running[0][1].clock
        began = clock()
        try:
            predictions = asked[0].session.model.predict_together(asked)
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            for answer, _, _ in waiting:
                answer.finish(error)
            continue
        passes = _step_shares(asked, clock() - began)
        for (answer, decoding, _), each, passed in zip(waiting, predictions, passes, strict=True):
            _told(answer, partial(decoding.take_drafter, each, passed))
    return [each for each in running if each[0].result is None]


def _commit(answer: Answer, one: PreparedRequest, predictions: Predictions, passed: Passed) -> None:
    records = one.take(predictions, passed)
    for record in records:
        answer.put(record)
    if records and records[-1].finish_reason is not None:
        answer.finish()


def _told(answer: Answer, do: Callable[[], T]) -> T | None:
    """What ``do`` returns; what goes wrong in it ends the answer, and its reader is told."""
    try:
        return do()
    except BaseException as error:  # noqa: BLE001 - raised where the answer is read
        answer.finish(error)
        return None


def _step_shares(asked: Sequence[Rows], seconds: float) -> list[Passed]:
    """Of a drafter's pass, each request's time: rows of the text pay for themselves, steps alike."""
    total, steps = sum(len(each.tokens) for each in asked), [each.wanted for each in asked if each.wanted]
    row_s = seconds / total
    step_s = row_s * sum(steps) / max(1, len(steps))
    read = (row_s * (len(each.tokens) - each.wanted) for each in asked)
    shares = (read_s + (step_s if each.wanted else 0.0) for each, read_s in zip(asked, read, strict=True))
    return [Passed(total, seconds, share_s, len(asked)) for share_s in shares]


def _shares(pricing: Pricing, asked: Sequence[Rows], seconds: float) -> list[Passed]:
    """A pass's time for each request: a row is as dear for all, drafts and prompts pay what they add."""
    rows, reads = [len(each.tokens) for each in asked], any(not each.wanted for each in asked)
    total, plain = sum(rows), len(rows)
    base_s = seconds * min(1.0, pricing.pass_seconds(plain) / pricing.pass_seconds(total))
    more = [(count - 1) / max(1, total - plain) for count in rows]
    shares = (base_s / plain + (seconds - base_s) * each for each in more)
    return [Passed(total, seconds, share_s, plain, reads) for share_s in shares]
