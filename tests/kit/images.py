"""Pictures made to order, and a model that is shown them."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image as Pillow

from edgespec.asking.images import Image
from edgespec.engine import LoadOptions, Model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.models import TEMPLATE, toy_bundle, toy_model


def picture(width: int = 7, height: int = 5, seed: int = 0) -> Pillow.Image:
    """RGB noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Pillow.fromarray(noise)


def encoded(image: Pillow.Image, form: str = "PNG", **options: Any) -> bytes:
    data = BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


class Seeing(ChatTemplate):
    """A template that takes pictures: each becomes the beginning of its digest."""

    def __init__(self) -> None:
        super().__init__(TEMPLATE)
        self.shown = list[Any]()  # messages of each prompt

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, arguments: Any = None
    ) -> list[int]:
        self.shown.append(messages)
        return super().encode([{**message, "content": _text(message)} for message in messages], tokenizer)


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["image"].digest[:4] if "image" in part else part["text"] for part in content)


def seeing_model(**options: Any) -> tuple[Model, Seeing]:
    """A toy that reads images, and the template that is shown its conversations."""
    template = Seeing()

    def bundle(name: str, context: int) -> Bundle:
        toy = toy_bundle(name, context)
        vars(toy).update(chat_template=template, reads_images=True)
        return toy

    return toy_model(bundle=bundle, options=LoadOptions(**options)), template


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[Image]:
    """The pictures of a conversation, in their order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def claiming(width: int, height: int) -> bytes:
    """A PNG file of one pixel whose header claims more."""
    data = bytearray(encoded(picture(1, 1)))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)
