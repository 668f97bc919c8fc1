"""Requests that are being answered: each round by round, and the rounds of all in one pass of the target."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from edgespec.decoding.draft import Passed, Work
from edgespec.drafting.pricing import Pricing
from edgespec.requests.prepared import PreparedRequest
from edgespec.requests.worker import Answer
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

T = TypeVar("T")


def take_turn(answers: Sequence[Answer], pricing: Pricing) -> None:
    """One pass over the next rows of all requests; who is over or fails is ended, and the others go on.

    ``pricing`` is told of how many requests the pass is, and chooses the rows of all their drafts.
    """
    pricing.sequences = max(1, len(answers))
    running = [(answer, one) for answer in answers if (one := _told(answer, partial(_go_on, answer)))]
    pricing.sequences = max(1, len(running))
    drafted = _drafted(running)
    if not drafted:
        return
    decodings = [one.decoding for _, one in drafted]
    counts = pricing.share([each.draft.confidence for each in decodings])
    for each, count in zip(decodings, counts, strict=True):
        each.draft = each.draft.head(count)
    beside = sum(1 + len(each.draft.tokens) for each in decodings if not each.unread)
    session, clock = drafted[0][1].session, drafted[0][1].clock
    piece = min(session.piece, pricing.piece(beside)) if beside else session.piece
    asked = [each.rows(piece) for each in decodings]
    began = clock()
    try:
        said = session.predict_together(asked)
    except BaseException as error:  # noqa: BLE001 - raised where the answers are read
        for answer, _ in drafted:
            answer.finish(error)
        return
    passes = _shares(pricing, asked, clock() - began)
    for (answer, one), predictions, passed in zip(drafted, said, passes, strict=True):
        _told(answer, partial(_commit, answer, one, predictions, passed))


def _go_on(answer: Answer) -> PreparedRequest | None:
    """The request, started if it is new; None if it is to end now."""
    one = answer.prepared
    if one is None:
        one = answer.prepared = answer.prepare()
        if one is None:
            answer.postpone()
            return None
        one.start(answer.queued_s)
        if (progress := one.progress) is not None:
            answer.put(progress)
    reason = answer.why_end()
    if reason is None:
        return one
    answer.put(one.stop(reason))
    answer.finish()
    return None


def _drafted(running: Sequence[tuple[Answer, PreparedRequest]]) -> list[tuple[Answer, PreparedRequest]]:
    """Those that have drafted; their drafters' steps share passes, as long as there are any to do."""
    asking: dict[Answer, tuple[Work[None], Rows]] = {}

    def go_on(answer: Answer, work: Work[None], said: Any) -> None:
        with suppress(StopIteration):
            asking[answer] = work, work.send(said)

    for answer, one in running:
        _told(answer, partial(go_on, answer, one.decoding.propose(), None))
    while asking:
        done, clock = list(asking.items()), running[0][1].clock
        asking.clear()
        began = clock()
        try:
            said = done[0][1][1].session.predict_together([rows for _, (_, rows) in done])
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            for answer, _ in done:
                answer.finish(error)
            break
        passes = _step_shares([rows for _, (_, rows) in done], clock() - began)
        for (answer, (work, _)), predictions, passed in zip(done, said, passes, strict=True):
            _told(answer, partial(go_on, answer, work, (predictions, passed)))
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
