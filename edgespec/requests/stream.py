"""An answer as it is written: thoughts, text and calls told from each other, for threads and for tasks."""

import codecs
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self
from weakref import finalize

from edgespec.requests.request import Request, RequestOptions
from edgespec.requests.results import CallPart, Generation, Record, ToolCall
from edgespec.requests.worker import LOOK_S, Answer, Worker
from edgespec_models.errors import Busy, RequestError
from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

if TYPE_CHECKING:  # answers without thoughts or tools need neither
    from edgespec.requests.call_reading import CallReader
    from edgespec_models.text.thoughts import Place

_ENDED_EARLY: Final = ("cancelled", "timeout", "closed")


class Stream:
    """Iterate over the text as it is generated, with ``for`` or ``async for``; then read :attr:`result`.

    Pieces are never half a character and never text that a stop string takes back. The request is queued
    when something is first asked of the stream: one that nobody reads costs nothing. One that is dropped
    half-read is cancelled, as it is when a ``with`` block around it is left. A task that is cancelled while
    it waits for text cancels the request.

    Iterating raises what went wrong, :class:`edgespec.Busy` and :class:`edgespec.Closed` at the start.
    """

    def __init__(self, answer: Answer, worker: Worker) -> None:
        self._answer, self._worker = answer, worker
        # The worker knows the answer alone, so that a stream that nobody holds any more can go.
        finalize(self, answer.interrupt, "cancelled").atexit = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (record := self._next()) is not None:
            if record.text:
                return record.text
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while (record := await self._next_async()) is not None:
            if record.text:
                return record.text
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()
        self._answer.wait_for_end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()
        while self._answer.result is None:
            self._answer.clear()
            await self._answer.wait_async(None)

    def records(self) -> "Records":
        """What each round added: an iterable of :class:`edgespec.Record`, both ways.

        First come records that say how far a long prompt is read, and have no text. It goes on where the
        iteration over the stream is, and the other way round.
        """
        return Records(self)

    def start(self) -> None:
        """Queue the request now, without waiting for it to be read.

        Raises:
            Busy: too many requests wait.
            Closed: the model is closed.
        """
        self._worker.submit(self._answer)

    @property
    def ended(self) -> bool:
        """Whether the answer is there, whole or as far as it came."""
        return self._answer.result is not None

    @property
    def at_once(self) -> int:
        """How many requests the model answers at once."""
        return self._worker.at_once

    def run(self) -> Generation:
        """Generate to the end; whatever interrupts the wait, such as Ctrl-C, cancels the request."""
        try:
            while self._next() is not None:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.result

    async def run_async(self) -> Generation:
        """The same in an event loop."""
        while await self._next_async() is not None:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request within a pass, from any thread; what came until then stays readable."""
        self._worker.withdraw(self._answer, "cancelled")

    @property
    def place(self) -> int:
        """How many requests are before this one in the model's queue; 0 once it runs."""
        return self._worker.place(self._answer)

    @property
    def result(self) -> Generation:
        """The finished generation; the partial one of a request that ended early, and why.

        Of a request that was cancelled, but runs yet, it waits for the end of the pass.

        Raises:
            RequestError: it still runs, or was never read.
        """
        if self._answer.interruption is not None and self._answer.begun:
            self._answer.wait_for_end()
        if self._answer.result is None:
            raise RequestError("the generation is not finished; read the stream to its end, or cancel it")
        return self._answer.result

    def _next(self) -> Record | None:
        """The next record; None at the end."""
        answer = self._answer
        self._worker.submit(answer)
        while not answer.readable:
            answer.wait(LOOK_S)
            self._look()
        return self._taken()

    async def _next_async(self) -> Record | None:
        answer = self._answer
        self._worker.submit(answer)
        try:
            while not answer.readable:
                await answer.wait_async(None if answer.begun else LOOK_S)
                self._look()
        except BaseException:
            self.cancel()
            raise
        return self._taken()

    def _taken(self) -> Record | None:
        """The next record of those that are there, which is told to who wants to know of progress."""
        record, tell = self._answer.take(), self._answer.request.on_progress
        if tell is not None and record is not None and record.progress is not None:
            try:
                tell(record.progress)
            except BaseException:
                self.cancel()
                raise
        return record

    def _look(self) -> None:
        """End a request that waits for its turn, if it is not to wait any more; one that runs sees itself."""
        reason = None if self._answer.begun else self._answer.why_end()
        if reason is not None:
            self._worker.withdraw(self._answer, reason)


class Records:
    """The records of a stream; see :meth:`Stream.records`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        record = self._stream._next()
        if record is None:
            raise StopIteration
        return record

    def __aiter__(self) -> AsyncIterator[Record]:
        return self

    async def __anext__(self) -> Record:
        record = await self._stream._next_async()
        if record is None:
            raise StopAsyncIteration
        return record


def asked(options: RequestOptions, ask: Callable[..., Stream]) -> list[Stream]:
    """The streams of the ``n`` answers that ``options`` want, which ``ask`` asks for one by one.

    Answer i has the seed ``seed + i``, so that each can be had again alone. Greedy answers are all the same,
    so one is decoded.
    """
    request = Request.of(options)
    one = options.copy()
    one.pop("n", None)
    if request.n == 1 or request.sampling.greedy:
        return [ask(**one)]
    seed = request.sampling.seed
    if seed is None:
        return [ask(**one) for _ in range(request.n)]
    return [ask(**{**one, "seed": (seed + i) % 2**64}) for i in range(request.n)]


def answers(options: RequestOptions, streams: Sequence[Stream]) -> Generation:
    """The first of the answers that :func:`asked` asked for, with all of them as its choices.

    Where one is ended early there are no further ones.
    """
    given = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            given.append(stream.run())
            if given[-1].finish_reason in _ENDED_EARLY:
                break
    return together(given, options)


async def answers_async(options: RequestOptions, streams: Sequence[Stream]) -> Generation:
    """:func:`answers` in an event loop."""
    given = list[Generation]()
    with _in_turn(streams) as turns:
        for stream in turns:
            given.append(await stream.run_async())
            if given[-1].finish_reason in _ENDED_EARLY:
                break
    return together(given, options)


@contextmanager
def _in_turn(streams: Sequence[Stream]) -> Iterator[Iterator[Stream]]:
    """Each in its turn, while as many run as the model answers at once; at the end they are cancelled."""

    def started() -> Iterator[Stream]:
        for at, stream in enumerate(streams):
            stream.start()
            with suppress(Busy):  # then the others wait for their turns here
                for other in streams[at + 1 : at + stream.at_once]:
                    other.start()
            yield stream

    try:
        yield started()
    finally:
        for stream in streams:
            stream.cancel()


def together(given: Sequence[Generation], options: RequestOptions) -> Generation:
    """The first of the answers to one prompt, with all of them as its choices."""
    first, *others = given
    request = Request.of(options)
    if request.sampling.greedy and first.finish_reason not in _ENDED_EARLY:
        others = [first] * (request.n - 1)
    return replace(first, others=tuple(others)) if others else first


class AnswerReader:
    """Reads an answer as its tokens are committed: thoughts, then text, then the calls within that.

    ``place`` is where the answer begins; None where it has no thoughts. ``calls`` reads what the text calls;
    None where that is nothing. Stop strings end the text; within thoughts they are thoughts. Raises what
    :class:`TextStream` does.

    Attributes:
        thoughts: what each token added to the thoughts, as far as these go.
        called: the calls that are whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        place: "Place | None" = None,
        calls: "CallReader | None" = None,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        self.thoughts, self.called = list[str](), list[ToolCall]() if calls is None else calls.calls
        self._tokenizer, self._place, self._calls = tokenizer, place, calls
        self._streams = [TextStream(tokenizer, stop=stop)]
        if calls is not None:  # which control tokens may begin
            self._streams.append(TextStream(tokenizer, stop=stop, spelled=calls.marks(tokenizer)))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before_text = 0  # tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._streams[0].stop_string

    @property
    def ended(self) -> bool:
        """Whether what follows is not read: a stop string came, or the last call that is wanted."""
        return self._streams[0].stopped or (self._calls is not None and self._calls.complete)

    def push(self, tokens: Sequence[int], *, final: bool = False) -> Record:
        """Take tokens, with the ``final`` ones what was held back: no more come.

        Tokens of thoughts, their tags with them, come first. The beginning of a closing tag is no thought.
        """
        before = self._before_text
        begun, rest = self._think(tokens)
        if final and self._place is not None:
            begun += self._place.held_text
        said = [
            each.push_bytes(begun) + each.push(rest) + (each.finish() if final else "")
            for each in self._streams
        ]
        content, calls = said[-1], list[CallPart]()
        if self._calls is not None:
            content, calls = self._calls.push(content, final=final)
        return Record(
            said[0], (), content=content, calls=tuple(calls), thoughts=tuple(self.thoughts[before:])
        )

    def _think(self, tokens: Sequence[int]) -> tuple[bytes, Sequence[int]]:
        """Read on to the text: its first bytes, and the tokens behind them."""
        begun = b""
        for at, token in enumerate(tokens):
            place = self._place
            if place is None or place.stage == "text":
                return begun, tokens[at:]
            self._place, thought, text = place.read_token(token, self._tokenizer)
            behind = self._place
            begun += text
            if place.thinks or behind.thinks:
                self.thoughts += [""] * (self._before_text - len(self.thoughts))  # what came before is a tag
                self.thoughts.append(self._decoder.decode(thought, final=not behind.thinks))
            self._before_text += 1
            if place.thinks and behind.has_text and place.tags.response:
                end = place.tags.response.replace("<", "</")
                for each in self._streams:
                    each.stops[end.encode()] = end
            if behind.stage == "text" and self._tokenizer.is_special(token):
                return begun, tokens[at:]
        return begun, ()


class TextStream:
    """Turns committed tokens into text that can be shown at once.

    >>> stream = TextStream(tokenizer, stop=["\\n\\n"])
    >>> shown = stream.push(tokens) + stream.finish()

    The pieces joined equal ``tokenizer.decode`` of all tokens, up to the first stop string. That is the
    one completed first, and the longest of those completed by the same byte, however the tokens were
    grouped into pushes. Special tokens contribute no text, but for those ``spelled``. Push committed tokens
    only: text that was handed out is not taken back.

    Raises RequestError where a stop string is empty or holds a lone surrogate.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), spelled: Collection[int] = ()
    ) -> None:
        if isinstance(stop, str):
            raise RequestError(f"stop must be a list of texts, not the text {stop!r}.")
        if not all(stop):
            raise RequestError("A stop string is empty. Leave it out.")
        try:
            # UTF-8 synchronises itself, so stop strings can be found in the bytes.
            self.stops = {text.encode("utf-8"): text for text in stop}
        except UnicodeEncodeError as error:
            raise RequestError(f"A stop string is not valid text: {error}") from error
        self._tokenizer, self._spelled = tokenizer, spelled
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""  # may be the beginning of a stop string
        self.stop_string: str | None = None
        """The stop string that ended the text; it is not part of the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what is pushed from then on is ignored."""
        return self.stop_string is not None

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens, return the text that can be shown now. Raises TokenizerError for an unknown id."""
        shown = (each for each in tokens if each in self._spelled or not self._tokenizer.is_special(each))
        return self.push_bytes(self._tokenizer.bytes_of(shown))

    def push_bytes(self, data: bytes) -> str:
        """The same of bytes."""
        if self.stopped:
            return ""
        text = self._held + data
        found = self._first_stop(text)
        if found is None:
            keep = len(text) - max((begun_at_end(text, stop) for stop in self.stops), default=0)
            self._held = text[keep:]
            return self._decoder.decode(text[:keep])
        start, stop = found
        self.stop_string, self._held = self.stops[stop], b""
        return self._decoder.decode(text[:start], final=True)

    def finish(self) -> str:
        """The text still held back: no more tokens come. An incomplete character becomes U+FFFD."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _first_stop(self, text: bytes) -> tuple[int, bytes] | None:
        """Start of the stop string completed first, and the stop string."""
        starts = ((text.find(stop), stop) for stop in self.stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None
