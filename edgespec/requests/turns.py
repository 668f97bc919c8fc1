"""A pass of the target over the next rows of all requests that run, and the drafters' passes before it."""

from collections.abc import Callable, Sequence
from statistics import fmean

from edgespec.decoding.draft import Load, Passed
from edgespec.drafting.pricing import Prices, Pricing
from edgespec.requests.decoding import RequestDecoding
from edgespec.requests.sequence import Decoding
from edgespec.requests.ticket import Stage, Ticket
from edgespec_runtimes.kv_cache import shared_length
from edgespec_runtimes.session import Rows

Begin = Callable[[Ticket, Prices], RequestDecoding | None]
"""Begins a request at these prices; None if there is no room for it beside running requests."""
Running = list[tuple[Ticket, RequestDecoding]]
_SHARE = 4  # of the rows that read prompts, so many parts: one is for the first


def take_turn(tickets: Sequence[Ticket], begin: Begin, pricing: Pricing) -> None:
    """One pass over the next rows of all requests; who is over or fails is ended, and the others go on.

    ``pricing`` chooses the rows of all their drafts.
    """
    for ticket in tickets:
        with ticket.ending_on_error():
            _go_on(ticket, tickets, begin, pricing)
    running = _running(tickets)
    reading = sum(decoding.unread > 0 for _, decoding in running)
    load = Load(max(1, len(running) - max(0, reading - 1)), _context(tickets))
    prices = pricing.at(load)
    _draft(running, prices)
    running = _running(tickets)
    if not running:
        return
    decodings = [decoding for _, decoding in running]
    counts = prices.share([decoding.draft.confidence for decoding in decodings])
    shares = list(zip(decodings, counts, strict=True))
    beside = sum(1 + count for decoding, count in shares if not decoding.unread)
    model, clock = decodings[0].session.model, decodings[0].clock
    most = _most_rows(shares, min(model.piece, prices.piece(beside)) if beside else model.piece)
    running = [pair for pair, rows in zip(running, most, strict=True) if rows]
    rows = [decoding.rows(room, count) for (decoding, count), room in zip(shares, most, strict=True) if room]
    began = clock()
    try:
        predictions = model.predict_together(rows)
    except BaseException as error:  # noqa: BLE001 - raised where the answers are read
        for ticket, _ in running:
            ticket.finish(error)
        return
    passes = _shares(prices, rows, clock() - began - model.prepared_s, model.experts_read)
    for (ticket, decoding), predicted, passed in zip(running, predictions, passes, strict=True):
        with ticket.ending_on_error():
            records = decoding.advance(predicted, passed)
            for record in records:
                ticket.put(record)
            if records and records[-1].finish_reason is not None:
                ticket.finish()


def _context(tickets: Sequence[Ticket]) -> float:
    """The mean number of tokens that a layer attends to in the requests that have begun."""
    return fmean([decoding.session.attended for _, decoding in _running(tickets)] or [0.0])


def _running(tickets: Sequence[Ticket]) -> Running:
    """The requests that have begun and not ended."""
    pairs = ((ticket, ticket.decoding) for ticket in tickets if ticket.result is None)
    return [(ticket, decoding) for ticket, decoding in pairs if decoding is not None]


def _go_on(ticket: Ticket, tickets: Sequence[Ticket], begin: Begin, pricing: Pricing) -> None:
    """Begin a new request, unless it waits for tokens that another reads; end a request that must end."""
    if ticket.decoding is None:
        if ticket.reason_to_end() is not None:
            ticket.abandon()
            return
        if _is_being_read(ticket, [decoding for _, decoding in _running(tickets)]):
            return
        # Nobody overtakes one that has found no room.
        is_full = any(other.stage is Stage.WAITING for other in tickets)
        prices = pricing.at(Load(len(tickets), _context(tickets)))
        ticket.decoding = None if is_full else begin(ticket, prices)
        if ticket.decoding is None:
            ticket.postpone()
            return
        if (progress := ticket.decoding.progress) is not None:
            ticket.put(progress)
    reason = ticket.reason_to_end()
    if reason is not None:
        ticket.put(ticket.decoding.stop(reason))
        ticket.finish()


def _is_being_read(ticket: Ticket, others: Sequence[RequestDecoding]) -> bool:
    """Whether others read most of its prompt just now, so that it need not be read twice."""
    if ticket.request.prompt_logprobs:  # for which it reads its prompt itself
        return False
    tokens, reading = ticket.prompt.target, [other for other in others if other.unread > 0]
    known = max((other.session.shared_prefix(tokens) for other in others), default=0)
    coming = max((shared_length(other.tokens, tokens) for other in reading), default=0) - known
    return coming > 0 and 2 * coming >= len(tokens) - known


def _most_rows(shares: Sequence[tuple[Decoding, int]], piece: int) -> list[int]:
    """The rows that each may have in a pass that reads ``piece`` tokens of prompts: the shortest goes first.

    A share is for the prompt that came first, so that it ends however many short ones come.
    """
    wanted = {
        at: decoding.unread + 1 + count for at, (decoding, count) in enumerate(shares) if decoding.unread
    }
    rows, left = [0 if at in wanted else piece for at in range(len(shares))], piece
    firsts = [(at, max(1, piece // _SHARE)) for at in [*wanted][:1]]
    for at, most in [*firsts, *((at, piece) for at in sorted(wanted, key=lambda at: wanted[at]))]:
        more = min(most, left, wanted[at] - rows[at])
        rows[at], left = rows[at] + more, left - more
    return rows


def _draft(running: Running, prices: Prices) -> None:
    """Draft for all; their drafters' steps share passes, as long as there are any to do."""
    wanted = list[tuple[Ticket, RequestDecoding, Rows]]()
    for ticket, decoding in running:
        with ticket.ending_on_error():
            if part := decoding.propose(prices):
                wanted.append((ticket, decoding, part))
    while wanted:
        asked, wanted = wanted, []
        rows, clock = [part for *_, part in asked], asked[0][1].clock
        model, began = rows[0].session.model, clock()
        try:
            predictions = model.predict_together(rows)
        except Exception as error:  # noqa: BLE001 - answers go on without drafts
            for ticket, decoding, _ in asked:
                with ticket.ending_on_error():
                    decoding.fail_drafter(error)
            return
        passes = step_shares(rows, clock() - began - model.prepared_s)
        for (ticket, decoding, _), predicted, passed in zip(asked, predictions, passes, strict=True):
            with ticket.ending_on_error():
                if part := decoding.take_drafter(predicted, passed):
                    wanted.append((ticket, decoding, part))


def step_shares(rows: Sequence[Rows], seconds: float) -> list[Passed]:
    """Split a drafter's pass among the requests: by the rows of text that each reads; steps share equally."""
    total, steps = sum(len(part.tokens) for part in rows), [part.wanted for part in rows if part.wanted]
    row_s = seconds / total
    step_s = row_s * sum(steps) / max(1, len(steps))
    shares = (row_s * (len(part.tokens) - part.wanted) + (step_s if part.wanted else 0.0) for part in rows)
    return [Passed(total, seconds, share_s, len(rows)) for share_s in shares]


def _shares(prices: Prices, rows: Sequence[Rows], seconds: float, experts: int) -> list[Passed]:
    """A pass's time for each request: a row is as dear for all, drafts and prompts pay what they add."""
    counts, reads = [len(part.tokens) for part in rows], any(not part.wanted for part in rows)
    total, plain = sum(counts), len(counts)
    base_s = seconds * min(1.0, prices.pass_seconds(plain) / prices.pass_seconds(total))
    more = [(count - 1) / max(1, total - plain) for count in counts]
    shares = (base_s / plain + (seconds - base_s) * share for share in more)
    return [Passed(total, seconds, share_s, plain, reads, experts, prices.load) for share_s in shares]
