"""A conversation, which keeps its history."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Unpack

from edgespec.answering.results import Generation
from edgespec.asking.request import RequestOptions
from edgespec.running.stream import Stream
from edgespec.running.ticket import InProcess
from edgespec_models.schema import checked, length

Parts = Sequence[Mapping[str, Any]]
"""A content with pictures, see :data:`edgespec.asking.request.Messages`."""


class Conversation(InProcess):
    """A conversation, which keeps its messages. :meth:`edgespec.Model.conversation` begins one.

    Its KV cache is put aside while the model answers others, and taken up again. Questions are answered in
    order: one that is asked before the last answer has ended waits for it.

    Args:
        start: asks the model. It gets a function that returns the messages, options, a function for the
            result, and the conversation.
        system: the system message, which comes first.
        defaults: options of every answer.

    Attributes:
        messages: dicts with ``role`` and ``content``. They may be edited between answers. An answer that
            ended early is kept as far as it came; a question without any answer text is dropped.
    """

    @checked
    def __init__(
        self, start: Callable[..., Stream], system: str | None = None, **defaults: Unpack[RequestOptions]
    ) -> None:
        self.messages: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._start, self._defaults = start, defaults

    def ask(self, text: str | Parts, **options: Unpack[RequestOptions]) -> Generation:
        """Ask ``text`` or parts, and return the answer. ``options`` override the conversation's options.

        Raises:
            RequestError: an option is out of range, or the messages do not fit the context any more
                (:class:`edgespec.DoesNotFit`).
        """
        return self.stream(text, **options).run()

    async def ask_async(self, text: str | Parts, **options: Unpack[RequestOptions]) -> Generation:
        """Like :meth:`ask`, in an event loop; cancelling the task ends the answer within a pass."""
        return await self.stream(text, **options).run_async()

    @checked
    def stream(self, text: Annotated[str | Parts, length(1)], **options: Unpack[RequestOptions]) -> Stream:
        """Like :meth:`ask`, piece by piece."""
        question = {"role": "user", "content": text}

        def ended(answer: Generation) -> None:
            if answer.text:
                self.messages += [question, answer.message]

        return self._start(lambda: [*self.messages, question], {**self._defaults, **options}, ended, self)
