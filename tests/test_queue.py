"""The queue by hand: what lacks room, what happens behind answers, and what ends in a pause."""

import threading
from collections.abc import Callable, Sequence
from time import sleep

import pytest

from edgespec.requests.queue import RequestQueue
from edgespec.requests.request import Request
from edgespec.requests.results import Record, nothing
from edgespec.requests.stream import Stream
from edgespec.requests.ticket import Stage, Ticket
from tests.kit.toy import until


def queue_by_hand(turn: Callable[[Sequence[Ticket]], None], at_once: int) -> RequestQueue:
    queue = RequestQueue(8, turn, at_once=at_once)
    queue.thread = threading.Thread()
    return queue


@pytest.mark.parametrize("leaves", ["waiting", "running"])
def test_what_waits_behind_a_request_without_room_begins_when_that_leaves(
    leaves: str,
) -> None:
    large, begun = set[Ticket](), list[Ticket]()

    def turn(tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket in large and any(other in begun for other in tickets if other.result is None):
                ticket.postpone()
            elif ticket.reason_to_end():
                ticket.abandon()
            elif ticket not in begun:
                begun.append(ticket)

    queue = queue_by_hand(turn, at_once=4)
    first, second, third = (Ticket(Request()) for _ in range(3))
    large.add(second)
    queue.put(first)
    queue.step()
    queue.put(second)
    queue.put(third)
    queue.step()
    assert second.stage is Stage.WAITING
    if leaves == "waiting":
        queue.step()  # it is back in the queue
    queue.withdraw(second, "cancelled")
    queue.step()
    assert third in begun and first.result is None


def test_room_that_comes_in_the_turn_in_which_one_lacks_it_is_taken() -> None:
    """Of three, the first ends behind the attempt to begin the last, which does not wait for the second."""
    begun, turns = list[Ticket](), list[int]()

    def turn(tickets: Sequence[Ticket]) -> None:
        turns.append(len(tickets))
        for ticket in tickets:
            if ticket is third and first.result is None:
                ticket.postpone()
            elif ticket not in begun:
                begun.append(ticket)
        if len(turns) == 2:
            first.end(nothing("stop"))

    queue = queue_by_hand(turn, at_once=4)
    first, second, third = (Ticket(Request()) for _ in range(3))
    queue.put(first)
    queue.put(second)
    queue.step()
    queue.put(third)
    queue.step()
    queue.step()
    assert third in begun and second.result is None


def ends_at_once(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.put(Record("x", (), "stop"))
        ticket.end(nothing("stop"))


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no place")])
def test_answers_go_on_when_tidying_fails(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failures = [error]

    def tidy(stop: Callable[[], bool]) -> None:
        if failures:
            raise failures.pop()

    queue = RequestQueue(8, ends_at_once, tidy=tidy)
    for _ in range(3):
        stream = Stream(Ticket(Request()), queue)
        stream.start()
        until(lambda: stream.ended)  # noqa: B023
    assert not failures
    until(lambda: queue.thread is None)
    (record,) = caplog.records
    assert "could not be put away" in record.message and record.exc_info is not None


class Paused:
    """A queue whose only request runs and is paused."""

    def __init__(self, request: Request) -> None:
        self.passes = 0
        self.queue = RequestQueue(8, self.turn)
        self.ticket = Ticket(request)
        self.stream = Stream(self.ticket, self.queue)
        self.stream.start()
        until(lambda: self.passes)
        self.queue.hold()
        self.held_at = self.passes

    def turn(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            with ticket.ending_on_error():
                if ticket.reason_to_end():
                    ticket.abandon()
                else:
                    self.passes += 1
                    sleep(0.001)


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_a_running_request_ends_in_a_pause_when_its_time_is_up_or_it_is_cancelled(reason: str) -> None:
    wish = threading.Event()
    request = Request(timeout=0.3) if reason == "timeout" else Request(cancelled=wish.is_set)
    paused = Paused(request)
    wish.set()
    until(lambda: paused.stream.ended)
    assert paused.stream.result.finish_reason == reason
    assert paused.passes == paused.held_at
    paused.queue.resume()
    until(lambda: paused.queue.thread is None)


def test_an_error_of_a_callback_ends_its_request_in_a_pause_too() -> None:
    calls = list[str]()

    def cancelled() -> bool:
        if calls:
            calls.append("again")
            raise ZeroDivisionError
        return False

    paused = Paused(Request(cancelled=cancelled))
    calls.append("paused")
    until(lambda: paused.stream.ended)
    with pytest.raises(ZeroDivisionError):
        paused.stream.run()
    assert calls == ["paused", "again"] and paused.passes == paused.held_at
    paused.queue.resume()
    until(lambda: paused.queue.thread is None)
