"""The pictures of a conversation among its tokens: markers, names of their rows, and their vectors."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.asking.images import Image
from edgespec_models.bundles.bundle import VISION_DATA, Bundle
from edgespec_models.errors import RequestError
from edgespec_models.families.towers import Tower, View
from edgespec_runtimes.session import Rows

_Vectors = npt.NDArray[np.float32]
_Positions = npt.NDArray[np.int64]
_NAMES = 1 << 62


def parts_of(prompt: object) -> list[Mapping[str, Any]]:
    """The parts of a conversation, in order; none of other prompts."""
    messages = prompt if isinstance(prompt, list | tuple) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping)]


def images_of(prompt: object) -> list[Image]:
    """The pictures of a conversation, in order, when they are read; none of other prompts."""
    images = [part.get("image") for part in parts_of(prompt)]
    return [image for image in images if isinstance(image, Image)]


def without_images(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The conversation's texts, for models that read nothing else."""
    if not images_of(messages):
        return messages

    def texts(content: Any) -> Any:
        if not isinstance(content, list | tuple):
            return content
        return [part for part in content if part.get("type") != "image"]

    return [{**message, "content": texts(message.get("content"))} for message in messages]


def with_markers(bundle: Bundle, tokens: list[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """``tokens`` of a conversation, with a marker for each row of a picture where the template has one.

    RequestError if the chat template does not show every picture.
    """
    images = images_of(messages)
    tower = bundle.manifest.vision if images else None
    if tower is None:
        return tokens
    if tokens.count(tower.marker) != len(images):
        raise RequestError(
            f"have {len(images)} pictures, and the model's chat template shows {tokens.count(tower.marker)}; "
            "give pictures in messages of the user",
            "messages",
        )
    rows = iter([tower.tokens(_views(tower, image)[1]) for image in images])
    return [id_ for token in tokens for id_ in (next(rows) if token == tower.marker else [token])]


def _views(tower: Tower, image: Image) -> tuple[int, Sequence[View]]:
    """A picture's budget, and its views."""
    budget = tower.budget(image.detail, image.image_tokens)
    return budget, tower.views(image.shape, budget)


class Pictures:
    """The pictures ``images`` in the place of markers in ``tokens`` of a prompt for ``bundle``.

    Keys and values are kept under a row's token. So each row of a picture has a negative name, of the
    picture, its budget, the tower and the row: two pictures never share them, and the same one does.

    ``see`` makes the vectors of a picture, float32 (rows, width), for a name, the picture, its budget, the
    number of its rows, and a function that says whether to stop.

    Attributes:
        tokens: the tokens of the prompt, with names in place of markers.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        images: Sequence[Image],
        bundle: Bundle,
        see: Callable[[str, Image, int, int, Callable[[], bool]], _Vectors],
    ) -> None:
        tower = bundle.manifest.vision
        assert tower is not None  # or its prompts would have no pictures
        self.tokens, self._see, self._images = [*tokens], see, images
        made_by = f"{bundle.manifest.files[VISION_DATA].sha256} {tower}"
        self._known = list[tuple[str, int, int]]()  # of each picture: its name, budget and rows
        self._places = list[tuple[int, int, range]]()  # of each view: picture, its first row there, and here
        self._vectors = dict[int, _Vectors]()
        self._whole = tower.whole
        self._has_axes, parts = tower.axes > 1, list[_Positions]()
        begin = before = end = 0
        for number, image in enumerate(images):
            budget, views = _views(tower, image)
            name = hashlib.sha256(f"{made_by} {image.digest} {budget}".encode())
            first = int.from_bytes(name.digest()[:8], "little") % _NAMES
            row = 0
            for view in views:
                start, count = self.tokens.index(tower.marker, end), tower.count(view.extent)
                end = start + count
                self.tokens[start:end] = [-1 - first - row for row in range(row, row + count)]
                self._places.append((number, row, range(start, end)))
                row += count
                grid = tower.grid(view.extent)
                parts += [_of_text(begin, start - before), _of_grid(begin + start - before, grid)]
                begin, before = begin + start - before + max(grid), end
            self._known.append((name.hexdigest(), budget, row))
        self._positions = np.concatenate([*parts, _of_text(begin, len(self.tokens) - end)])
        self._next = begin + len(self.tokens) - end  # position behind the prompt

    def end(self, start: int, end: int) -> int:
        """Where a pass over the rows from ``start`` ends that has room up to ``end``.

        It does not end within a picture whose rows see each other. Such a picture may be longer than the
        room.
        """
        for _, _, places in self._places if self._whole else ():
            if places.start < end < places.stop:
                return places.start if start < places.start else places.stop
        return end

    @property
    def end_of_last(self) -> int:
        """The place behind the last picture, from which other questions about it go on."""
        return self._places[-1][2].stop

    def positions(self, start: int, end: int) -> _Positions | None:
        """Times, rows and columns of rows from ``start`` to before ``end``; None if they are ordinary.

        A picture's rows have the time of its beginning. The text behind goes on with the next free number.
        """
        if not self._has_axes:
            return None
        known = len(self._positions)
        behind = _of_text(self._next + max(start - known, 0), end - max(start, known))
        return np.concatenate([self._positions[start:end], behind])

    def of_head(self, rows: Rows, start: int) -> Rows:
        """A head's rows of the text's tokens from ``start`` on, each at the position of the token before."""
        end = start + len(rows.tokens)
        named = self.tokens[start:end]
        tokens, vectors = [*named, *rows.tokens[len(named) :]], self.vectors(start, end)
        return replace(rows, tokens=tokens, vectors=vectors, positions=self.positions(start - 1, end - 1))

    def vectors(self, start: int, end: int, stop: Callable[[], bool] = lambda: False) -> _Vectors | None:
        """The vectors of rows from ``start`` to before ``end``; None if none is of a picture.

        Raises as :meth:`edgespec_runtimes.vision.VisionSession.vectors` does.
        """
        parts = list[_Vectors]()
        for number, row, places in self._places:
            first, last = max(start, places.start), min(end, places.stop)
            if first < last:
                if number not in self._vectors:
                    name, budget, rows = self._known[number]
                    self._vectors[number] = self._see(name, self._images[number], budget, rows, stop)
                behind = row - places.start
                parts.append(self._vectors[number][behind + first : behind + last])
        return np.concatenate(parts) if parts else None


def _of_text(first: int, count: int) -> _Positions:
    """Positions of rows of text, (count, 3)."""
    return np.repeat(np.arange(first, first + max(count, 0))[:, None], 3, axis=1)


def _of_grid(first: int, grid: tuple[int, int]) -> _Positions:
    """Those of a picture's rows."""
    row, column = np.indices(grid).reshape(2, -1)
    return first + np.stack([np.zeros_like(row), row, column], axis=1)
