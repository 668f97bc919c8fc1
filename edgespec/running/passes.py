"""A pass of the target over the next rows of all sequences, and the drafters' passes before it."""

from statistics import fmean

from edgespec.decoding.draft import Clock, Load, Passed
from edgespec.drafting.pricing import Prices, Pricing
from edgespec.running.sequence import Sequence
from edgespec_models.errors import DeviceError
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

_SHARE = 4  # of the rows that read prompts, so many parts: one is for the first


def take_further(sequences: list[Sequence], pricing: Pricing) -> None:
    """Draft for all, and take them a round or a piece of their prompts further, in one pass.

    ``pricing`` chooses the rows of all their drafts. Who is over or fails is ended, and the others go on. A
    pass that lacks memory is taken again for each alone.
    """
    for sequence in sequences:
        with sequence.ticket.ending_on_error():
            sequence.prepare()
    if not all(sequence.is_live for sequence in sequences):  # the caches of the others may be empty now
        return take_further([sequence for sequence in sequences if sequence.is_live], pricing)
    reading = sum(sequence.unread > 0 for sequence in sequences)
    prices = pricing.at(Load(max(1, len(sequences) - max(0, reading - 1)), context(sequences)))
    _draft(sequences, prices)
    sequences = [sequence for sequence in sequences if sequence.is_live]
    if not sequences:
        return
    counts = prices.share([sequence.draft.confidence for sequence in sequences])
    most = _most_rows(sequences, counts, prices)
    shares = [share for share in zip(sequences, counts, most, strict=True) if share[2]]
    rows = [sequence.rows(room, count) for sequence, count, room in shares]
    try:
        predictions, seconds = _pass(rows, sequences[0].answer.clock)
    except BaseException as error:  # noqa: BLE001 - raised where the answers are read
        for sequence, *_ in shares:
            if isinstance(error, DeviceError) and len(shares) > 1:  # alone they may have enough memory
                take_further([sequence], pricing)
            else:
                sequence.ticket.finish(error)
        return
    passes = _shares(prices, rows, seconds)
    for (sequence, *_), predicted, passed in zip(shares, predictions, passes, strict=True):
        with sequence.ticket.ending_on_error():
            sequence.advance(predicted, passed)


def context(sequences: list[Sequence]) -> float:
    """The mean number of tokens that a layer attends to."""
    return fmean([sequence.session.attended for sequence in sequences] or [0.0])


def _draft(sequences: list[Sequence], prices: Prices) -> None:
    """Draft for all; their drafters' steps share passes, as long as there are any to do."""
    wanted = list[tuple[Sequence, Rows]]()
    for sequence in sequences:
        with sequence.ticket.ending_on_error():
            if part := sequence.propose(prices):
                wanted.append((sequence, part))
    while wanted:
        asked, wanted = wanted, []
        rows = [part for _, part in asked]
        try:
            predictions, seconds = _pass(rows, sequences[0].answer.clock)
        except Exception as error:  # noqa: BLE001 - answers go on without drafts
            for sequence, _ in asked:
                with sequence.ticket.ending_on_error():
                    sequence.fail_drafter(error)
            return
        passes = step_shares(rows, seconds)
        for (sequence, _), predicted, passed in zip(asked, predictions, passes, strict=True):
            with sequence.ticket.ending_on_error():
                if part := sequence.take(predicted, passed):
                    wanted.append((sequence, part))


def _pass(rows: list[Rows], clock: Clock) -> tuple[list[Predictions], float]:
    """A model's predictions for all rows, and the seconds that they took."""
    model, began = rows[0].session.model, clock()
    predictions = model.predict_together(rows)
    return predictions, clock() - began - model.prepared_s


def _most_rows(sequences: list[Sequence], drafted: list[int], prices: Prices) -> list[int]:
    """The rows that each may have in a pass: all of a round, and of prompts a piece, the shortest first.

    A share is for the prompt that came first, so that it ends however many short ones come.
    """
    model, unread = sequences[0].session.model, [one.unread for one in sequences]
    answering = sum(1 + count for count, left in zip(drafted, unread, strict=True) if not left)
    piece = min(model.piece, prices.piece(answering)) if answering else model.piece
    wanted = {at: left + 1 + drafted[at] for at, left in enumerate(unread) if left}
    rows, left = [0 if at in wanted else piece for at in range(len(sequences))], piece
    firsts = [(at, max(1, piece // _SHARE)) for at in [*wanted][:1]]
    for at, most in [*firsts, *((at, piece) for at in sorted(wanted, key=lambda at: wanted[at]))]:
        more = min(most, left, wanted[at] - rows[at])
        rows[at], left = rows[at] + more, left - more
    return rows


def step_shares(rows: list[Rows], seconds: float) -> list[Passed]:
    """Split a drafter's pass among the requests: by the rows of text that each reads; steps share equally."""
    total, steps = sum(len(part.tokens) for part in rows), [part.wanted for part in rows if part.wanted]
    row_s = seconds / total
    step_s = row_s * sum(steps) / max(1, len(steps))
    shares = (row_s * (len(part.tokens) - part.wanted) + (step_s if part.wanted else 0.0) for part in rows)
    return [Passed(total, seconds, share_s, len(rows)) for share_s in shares]


def _shares(prices: Prices, rows: list[Rows], seconds: float) -> list[Passed]:
    """A pass's time for each request: all pay for one row alike, and for more rows what these add."""
    counts = [len(part.tokens) for part in rows]
    reads = any(len(part.tokens) > part.wanted for part in rows)  # rows of a prompt
    total, plain, experts = sum(counts), len(counts), rows[0].session.model.experts_read
    base_s = seconds * min(1.0, prices.pass_seconds(plain) / prices.pass_seconds(total))
    more = [(count - 1) / max(1, total - plain) for count in counts]
    shares = (base_s / plain + (seconds - base_s) * share for share in more)
    return [Passed(total, seconds, share_s, plain, reads, experts, prices.load) for share_s in shares]
