"""Pictures of prompts, read from files, bytes, data URLs and Pillow's images. Nothing is fetched.

Pillow is imported where a picture is read; it is the extra ``images``.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError, RequestError, require
from edgespec_models.schema import shown
from edgespec_models.storage import expanded, read_bytes
from edgespec_runtimes.memory import give_back

MOST_IMAGES: Final = 64
"""Pictures of a request."""
MOST_PIXELS: Final = 1 << 26
"""Pixels of all pictures of a request together: 64 Mi, which are 192 MiB here."""
MOST_BYTES: Final = 64 << 20
"""Bytes of a picture's file."""
_MOST_SIDE: Final = 1 << 16  # Pillow's tables for resizing have a row for each pixel of a side
_MOST_SCANNED: Final = 16 * MOST_PIXELS  # of a JPEG file, whose scans each go over all pixels
_DECODING: Final = Lock()  # a decoder takes several bytes a pixel, so there is one at a time
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_DETAILS: Final = ("auto", "low", "high", "original")  # as in OpenAI's API
_ADDRESS: Final = re.compile(r"(?a:[a-z][\w+.-]+:)", re.IGNORECASE)  # C: is a drive
_SAFE: Final = str.maketrans("-_", "+/")  # of URLs
_INLINE: Final = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Image:
    """A picture of a prompt. Of a file it holds the bytes, because pixels of waiting requests take memory.

    Attributes:
        read: decodes the pixels.
        shape: (height, width, 3), of the pixels.
        digest: of the pixels and their shape.
        detail: how much of it the model sees: ``"low"``, ``"high"`` or ``"auto"``.
        image_tokens: the tokens that it may take in the prompt; None leaves them to the model.
    """

    read: Callable[[], NDArray[np.uint8]]
    shape: tuple[int, ...]
    digest: str
    detail: str = "auto"
    image_tokens: int | None = None

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Uint8 (height, width, 3), RGB, upright, opaque; each call decodes them."""
        return self.read()


def read_image(
    source: object,
    field: str = "image",
    *,
    detail: str = "auto",
    image_tokens: int | None = None,
    most_pixels: int = MOST_PIXELS,
) -> Image:
    """The picture in a file, bytes, a data URL or one of Pillow's images.

    Files are PNG, JPEG, WebP or GIF, of which the first frame counts. What is transparent becomes white.

    Raises:
        RequestError: the picture, called ``field``, cannot be read, is too large or an address, or Pillow is
            not installed.
    """
    try:
        require("reading it", "images", "PIL.Image")
    except EdgespecError as error:
        raise RequestError(f"is a picture, and {error}", field) from error
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    picture: Any = source
    what = "is"
    if isinstance(source, str) and _ADDRESS.match(source):
        source = decoded(source, field)
    elif isinstance(source, str | PathLike):
        what, source = f"is {shown(str(source))},", _file(Path(source), field)
    if not isinstance(source, bytes | bytearray | memoryview | Pillow.Image):
        raise RequestError(
            f"is {shown(source)}; allowed: a path, the bytes of a file, or an image of Pillow", field
        )
    large = (
        f"allowed: {MOST_PIXELS:,} pixels in all pictures of a request together, {_MOST_SIDE:,} a side; "
        "make it smaller"
    )
    try:
        if not isinstance(source, Pillow.Image):
            source = bytes(source)
            picture = _opened(source)
        count = picture.width * picture.height
        if count > most_pixels or max(picture.size) > _MOST_SIDE:
            raise RequestError(f"{what} {picture.width} x {picture.height} pixels large; {large}", field)
        if not isinstance(source, Pillow.Image) and picture.format in ("JPEG", "MPO"):
            scans = source.count(b"\xff\xda")
            if count * scans > _MOST_SCANNED:
                raise RequestError(f"{what} a JPEG file of {scans} scans, too many; save it anew", field)
        pixels = _pixels(picture)
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(f"{what} no PNG, JPEG, WebP or GIF picture; convert it to one", field) from None
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):  # at Pillow's own limit
        raise RequestError(f"{what} too large; {large}", field) from None
    except Exception as error:  # decoders raise all kinds of errors over damaged files
        problem = str(error) or type(error).__name__
        raise RequestError(f"{what} no whole picture ({problem}); save it anew", field) from error
    digest = sha256(f"{pixels.shape}".encode())
    digest.update(pixels.data)
    read = partial(_of_file, source) if isinstance(source, bytes) else partial(np.asarray, pixels)
    return Image(read, pixels.shape, digest.hexdigest(), detail, image_tokens)


def _of_file(file: bytes) -> NDArray[np.uint8]:
    return _pixels(_opened(file))


def _opened(file: bytes) -> Any:
    from PIL import Image as Pillow

    return Pillow.open(BytesIO(file), formats=_FORMATS)


def _pixels(picture: Any) -> NDArray[np.uint8]:
    with _DECODING:
        picture.load()
        return np.ascontiguousarray(_opaque(picture))


def decoded(url: str, field: str) -> bytes:
    """The bytes of a data URL or of base64 alone, in any way to write it; RequestError for addresses."""
    url = url.lstrip()
    start = _INLINE.match(url)
    if start is None and _ADDRESS.match(url):
        raise RequestError(
            f"is the address {shown(url)}, and edgespec fetches nothing; send the picture itself as "
            "data:image/png;base64,BASE64",
            field,
        )
    if len(url) > MOST_BYTES * 3 // 2:
        raise RequestError(f"has {len(url):,} characters; allowed: files of {MOST_BYTES:,} bytes", field)
    try:
        text = "".join(url[start.end() if start else 0 :].split()).rstrip("=")
        return base64.b64decode(text.translate(_SAFE) + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise RequestError(
            f"is no base64 ({error}); send data:image/png;base64,BASE64, or BASE64 alone", field
        ) from None


def with_images(
    messages: Sequence[Mapping[str, Any]], bundle: Bundle, image_tokens: int | None = None
) -> Sequence[Mapping[str, Any]]:
    """``messages`` in which every picture is a part ``{"type": "image", "image": Image}``.

    Parts of users are ``{"type": "image", "image": SOURCE}``, see :func:`read_image`, or OpenAI's
    ``image_url``; both may have a ``detail``. ``where`` of a part is its place in the client's request.

    Raises:
        RequestError: a picture cannot be read, there are too many, or the model reads no images.
    """
    images = list[Image]()

    def read(part: Any, place: str) -> Any:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image", "image_url"):
            return part
        inner = part.get(kind)
        source, field, holder = inner, f"{place}.{kind}", part
        if kind == "image_url" and isinstance(inner, Mapping):
            source, field, holder = inner.get("url"), f"{field}.url", inner
        field, detail = part.get("where", field), holder.get("detail") or "auto"
        if not bundle.reads_images:
            name = bundle.manifest.name
            raise RequestError(
                f"is a picture, and {name} reads no images; use a model that does, or leave it out", field
            )
        if len(images) == MOST_IMAGES:
            raise RequestError(f"is one picture too many; allowed: {MOST_IMAGES} in a request", field)
        if detail not in _DETAILS:
            raise RequestError(f"has the detail {shown(detail)}; allowed: {', '.join(_DETAILS)}", field)
        if kind == "image_url":
            if not isinstance(source, str):
                raise RequestError(f"is {shown(source)}; allowed: data:image/png;base64,BASE64", field)
            source = decoded(source, field)
        left = MOST_PIXELS - sum(image.shape[0] * image.shape[1] for image in images)
        detail = "high" if detail == "original" else detail
        images.append(read_image(source, field, detail=detail, image_tokens=image_tokens, most_pixels=left))
        return {"type": "image", "image": images[-1]}

    def seen(message: Any, place: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [read(part, f"{place}[{n}]") for n, part in enumerate(content)]}

    result = [seen(message, f"messages[{at}].content") for at, message in enumerate(messages)]
    if not images:
        return messages
    give_back()
    return result


def _file(path: Path, field: str) -> bytes:
    try:
        return read_bytes(expanded(path), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot be read: {error}", field) from error


def _opaque(picture: Any) -> NDArray[np.uint8]:
    """The pixels (height, width, 3) of a picture as it is to be seen."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    with suppress(Exception):  # what is wrong in EXIF turns nothing
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):
        picture = Pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        white = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(white, picture.convert("RGBA"))
    pixels: NDArray[np.uint8] = np.asarray(picture.convert("RGB"))
    return pixels
