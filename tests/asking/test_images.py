"""Pictures of prompts: what is read as it is to be seen, what is refused, and how an app gives them."""

import io
import os
import sys
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from edgespec import LoadOptions
from edgespec.asking.images import MOST_PIXELS, Image, read_image
from edgespec_models.errors import RequestError
from tests.kit.images import base64_of, claiming, data_url, encoded, images_in, picture, seeing_model
from tests.kit.models import toy_model

RGB = picture(9, 6)
PIXELS = np.asarray(RGB)
FORMS: dict[str, dict[str, Any]] = {"PNG": {}, "WEBP": {"lossless": True}, "GIF": {}, "JPEG": {"quality": 95}}
FILES = {form: encoded(picture(40, 30), form, **options) for form, options in FORMS.items()}
FILES["progressive"] = encoded(picture(40, 30), "JPEG", progressive=True)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_pixels_of_files_are_those_that_were_written(form: str, tmp_path: Path) -> None:
    data = encoded(RGB, form, **FORMS[form])
    (tmp_path / "a").write_bytes(data)
    sources = (data, bytearray(data), memoryview(data), tmp_path / "a", str(tmp_path / "a"), data_url(data))
    images = [read_image(source) for source in sources]
    assert all(np.array_equal(image.pixels, PIXELS) for image in images)
    assert {image.digest for image in images} == {read_image(RGB).digest}
    image = images[0]
    assert image.pixels.dtype == np.uint8 and image.pixels.shape == (6, 9, 3)
    assert (image.detail, image.image_tokens) == ("auto", None)
    assert image.pixels.flags.c_contiguous


def test_the_digest_is_of_pixels_and_their_shape() -> None:
    black, other = Pillow.new("RGB", (4, 6)), Pillow.new("RGB", (6, 4))
    first, second, third = (read_image(image).digest for image in (black, other, Pillow.new("L", (4, 6))))
    assert first != second and first == third != read_image(RGB).digest


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_orientation_is_turned_back(form: str, orientation: int) -> None:
    turned = {
        1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1],
        5: PIXELS.swapaxes(0, 1), 6: np.rot90(PIXELS, -1), 7: PIXELS[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(PIXELS),
    }[orientation]  # fmt: skip
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    flat = Pillow.fromarray(np.repeat(np.repeat(PIXELS, 16, 0), 16, 1))  # blocks that JPEG keeps
    seen = read_image(encoded(flat, form, exif=exif, **FORMS[form])).pixels[8::16, 8::16]
    assert seen.shape == turned.shape and np.abs(seen.astype(int) - turned).max() < 8


def test_damaged_exif_turns_nothing() -> None:
    for exif in (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12", b"Exif\0\0"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's
            assert read_image(encoded(RGB, "JPEG", exif=exif)).pixels.shape == (6, 9, 3)


@pytest.mark.parametrize(
    ("image", "form", "seen"),
    [
        (Pillow.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG", (255, 255, 255)),
        (Pillow.new("RGBA", (2, 2), (255, 0, 0, 128)), "PNG", (255, 127, 127)),
        (Pillow.new("RGBA", (2, 2), (9, 9, 9, 0)), "WEBP", (255, 255, 255)),
        (Pillow.new("LA", (2, 2), (0, 51)), "PNG", (204, 204, 204)),
        (Pillow.new("L", (2, 2), 200), "PNG", (200, 200, 200)),
        (Pillow.new("1", (2, 2), 1), "PNG", (255, 255, 255)),
        (Pillow.new("RGB", (2, 2), (1, 2, 3)).quantize(4), "PNG", (1, 2, 3)),
        (Pillow.new("RGB", (2, 2), (1, 2, 3)).quantize(4), "GIF", (1, 2, 3)),
        (Pillow.fromarray(np.full((2, 2), 0x1234, np.uint16)), "PNG", (0x12, 0x12, 0x12)),
        (Pillow.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG", (0, 0, 0)),
        (Pillow.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG", (0, 255, 255)),
    ],
    ids=lambda value: getattr(value, "mode", str(value)),
)
def test_all_kinds_of_pixels_become_rgb_on_white(
    image: Pillow.Image, form: str, seen: tuple[int, int, int]
) -> None:
    for source in (image, encoded(image, form)):
        pixels = read_image(source).pixels.astype(int)
        assert pixels.shape == (*image.size, 3) and np.abs(pixels - seen).max() <= 1


def test_a_colour_that_a_palette_calls_transparent_is_white() -> None:
    image = Pillow.new("RGB", (2, 2), (1, 2, 3)).quantize(4)
    for form in ("PNG", "GIF"):
        pixels = read_image(encoded(image, form, transparency=image.getpixel((0, 0)))).pixels
        assert pixels.min() == 255


def test_the_first_frame_counts() -> None:
    frames = [Pillow.new("RGB", (3, 2), colour) for colour in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if form == "WEBP" else {}
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **lossless)
        assert read_image(data).pixels[0, 0].tolist() == [255, 0, 0]


def test_pillows_image_stays_as_it_is() -> None:
    opened = Pillow.open(io.BytesIO(encoded(RGB, "PNG")))
    exif = opened.getexif()
    exif[0x0112] = 6
    turned = read_image(opened).pixels
    assert opened.size == (9, 6) and turned.shape == (9, 6, 3)
    turned = np.array(turned)
    assert np.array_equal(np.asarray(opened), PIXELS)


def _fails(source: object, told: str, **options: Any) -> None:
    with pytest.raises(RequestError) as failed:
        read_image(source, "place", **options)
    assert failed.value.field == "place" and told in str(failed.value), str(failed.value)
    assert len(str(failed.value)) < 400


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("a text")
    _fails(tmp_path / "a.png", "a.png', no PNG, JPEG, WebP or GIF picture; convert it to one")
    _fails(tmp_path / "none.png", "cannot be read: ")
    _fails(tmp_path, "cannot be read: ")
    _fails("\0", "cannot be read: ")
    _fails("~no-such-user/a.png", "cannot be read: ")
    _fails(b"", "is no PNG")
    _fails(encoded(RGB, "BMP"), "is no PNG")
    _fails(encoded(RGB, "TIFF"), "is no PNG")
    _fails(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is no PNG")
    _fails(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no PNG")  # no program is started
    for other in (None, 3, PIXELS.tolist(), ["a"]):
        _fails(other, "allowed: a path, the bytes of a file, or an image of Pillow")


def test_only_ordinary_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((64 << 20) + 1)
    _fails(tmp_path / "large.png", "it is larger than")
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe.png")
        _fails(tmp_path / "pipe.png", "it is no ordinary file")
    _fails("data:image/png;base64," + "A" * (100 << 20), "allowed: files of 67,108,864 bytes")


def test_addresses_are_not_fetched() -> None:
    for address in ("http://127.0.0.1:9/a.png", "https://a/b", "FILE:///etc/passwd", "ftp://a", "blob:x"):
        _fails(
            address, "and edgespec fetches nothing; send the picture itself as data:image/png;base64,BASE64"
        )


@pytest.mark.parametrize("side", [8193, 12_000, 2**31 - 1])
def test_sizes_are_bounded_before_pixels_are_decoded(side: int) -> None:
    for action in ("ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action, Pillow.DecompressionBombWarning)
            _fails(claiming(side, side), "large; allowed: 67,108,864 pixels in all pictures of a request")
    _fails(picture(3, 3), "is 3 x 3 pixels large; allowed: 67,108,864 pixels in all", most_pixels=8)
    _fails(claiming(65_537, 1), "pictures of a request together, 65,536 a side")
    assert MOST_PIXELS == 8192 * 8192


def test_headers_that_lie_are_refused() -> None:
    _fails(claiming(500, 500), "is no whole picture")
    bomb = encoded(RGB, "GIF").replace(
        b"\x09\0\x06\0", b"\xff\xff\xff\xff"
    )  # the screen's size and the frame's
    with pytest.raises(RequestError):
        read_image(bomb)


def test_a_jpeg_file_of_thousands_of_scans_is_refused() -> None:
    data = encoded(Pillow.new("L", (2000, 2000)), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    scan, scans = data[start:-2], data.count(b"\xff\xda")
    assert read_image(data[:start] + scan * 200 + data[-2:]).pixels.shape == (2000, 2000, 3)
    _fails(data[:start] + scan * 1000 + data[-2:], f"is a JPEG file of {scans + 999} scans, too many")


def test_texts_that_unpack_to_gigabytes_are_refused() -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("a", "x" * (65 << 20), zip=True)
    with pytest.raises(RequestError, match="is no"):
        read_image(encoded(RGB, "PNG", pnginfo=info))


@pytest.mark.fuzz
@given(st.sampled_from(sorted(FILES)), st.data())
def test_cut_files_are_an_error_or_whole(name: str, data: st.DataObject) -> None:
    file = FILES[name]
    whole, end = read_image(file), data.draw(st.integers(0, len(file) - 1))
    try:
        image = read_image(file[:end], "place")
    except RequestError as error:
        assert error.field == "place"
    else:
        assert np.array_equal(image.pixels, whole.pixels), end


@pytest.mark.fuzz
@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_files_are_an_error_or_a_picture(name: str, data: st.DataObject) -> None:
    file = bytearray(FILES[name])
    for at, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255)), max_size=8)
    ):
        file[at] = byte
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about EXIF and the like
            image = read_image(bytes(file), "place")
    except RequestError as error:
        assert error.field == "place"
    else:
        assert image.pixels.dtype == np.uint8 and image.pixels.shape[2] == 3


# ---- in conversations ----


def test_an_app_gives_paths_bytes_pillows_images_and_openais_parts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(RGB))
    sources = [tmp_path / "a.png", str(tmp_path / "a.png"), encoded(RGB), RGB]
    parts: list[Any] = [{"type": "image", "image": source} for source in sources]
    parts += [{"type": "text", "text": "or"}, {"type": "image", "image": RGB, "detail": "low"}]
    url = {"url": base64_of(encoded(RGB)), "detail": "high"}
    parts += [
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": data_url(encoded(RGB))},
    ]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    model, template = seeing_model()
    with model:
        assert model.reads_images
        model.chat(messages, max_tokens=2)
        assert template.shown[-1][0] == messages[0]
        images = images_in(template.shown[-1])
        assert [image.detail for image in images] == ["auto"] * 4 + ["low", "high", "auto"]
        assert {type(image) for image in images} == {Image} and len({image.digest for image in images}) == 1
        kinds = [part["type"] for part in template.shown[-1][1]["content"]]
        assert kinds == ["image"] * 4 + ["text"] + ["image"] * 3
        assert parts[0]["image"] == sources[0]  # the app's messages stay as they are
        assert model.count_tokens(messages) > model.count_tokens(messages[:1])


def test_a_conversation_takes_pictures_with_its_question() -> None:
    model, template = seeing_model()
    with model:
        talk = model.conversation(max_tokens=2)
        talk.ask([{"type": "image", "image": RGB}, {"type": "text", "text": "What?"}])
        talk.ask("And?")
        assert [len(images_in(messages)) for messages in template.shown] == [1, 1]
        assert talk.messages[0]["content"][0] == {"type": "image", "image": RGB}


@pytest.mark.parametrize(
    ("load", "request_", "tokens"), [(None, None, None), (70, None, 70), (70, 280, 280), (None, 9, 9)]
)
def test_the_requests_budget_goes_before_that_of_the_load(
    load: int | None, request_: int | None, tokens: int | None
) -> None:
    model, template = seeing_model(image_tokens=load)
    messages: Any = [{"role": "user", "content": [{"type": "image", "image": RGB}]}]
    with model:
        model.chat(messages, max_tokens=1, image_tokens=request_)
        model.count_tokens(messages, image_tokens=request_)
    assert [images_in(shown)[0].image_tokens for shown in template.shown] == [tokens, tokens]


def test_budgets_out_of_range_are_refused() -> None:
    with pytest.raises(RequestError, match="image_tokens is 0"):
        LoadOptions(image_tokens=0)
    model, _ = seeing_model()
    with model:
        for wrong in (0, 20_000, 1.5, True):
            with pytest.raises(RequestError, match="image_tokens is"):
                model.chat([{"role": "user", "content": "a"}], image_tokens=wrong)  # type: ignore[arg-type] # meant
        with pytest.raises(RequestError, match="image_tokens is for conversations"):
            model.generate("a", image_tokens=70)


def test_a_model_that_reads_no_images_says_so_before_it_looks(tmp_path: Path) -> None:
    with toy_model() as model:
        assert not model.reads_images
        for kind in ("image", "image_url"):
            messages = [{"role": "user", "content": [{"type": kind, kind: str(tmp_path / "none")}]}]
            for ask in (model.chat, model.stream_chat, model.count_tokens):
                with pytest.raises(RequestError, match="is a picture, and toy reads no images") as failed:
                    ask(messages)
                assert failed.value.field == f"messages[0].content[0].{kind}"


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    _fails(b"", "is a picture, and reading it needs PIL")
    _fails(b"", 'pip install "edgespec[images]"')


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps what was freed")
def test_what_decoding_took_is_given_back() -> None:
    """Threads of glibc keep blocks of a picture, hundreds of megabytes each."""
    data = encoded(Pillow.new("RGBA", (2500, 2500), (1, 2, 3, 100)))
    model, _ = seeing_model()
    process = psutil.Process()

    def read(number: int) -> None:
        assert model.count_tokens([{"role": "user", "content": [{"type": "image", "image": data}]}])

    with model, ThreadPoolExecutor(3) as pool:
        read(0)
        before = process.memory_info().rss
        [*pool.map(read, range(3))]
        assert process.memory_info().rss - before < 48 << 20


def test_a_read_file_holds_its_bytes_and_not_its_pixels() -> None:
    """So a queue of requests with pictures stays small."""
    data = encoded(Pillow.new("RGB", (2000, 2000)))
    tracemalloc.start()
    image = read_image(data)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20 < image.pixels.nbytes
    assert image.shape == image.pixels.shape == (2000, 2000, 3)
