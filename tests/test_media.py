"""What a user may pass, and what is refused and how."""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import pytest

from jaxvit import Image, Video
from jaxvit.errors import JaxvitError, MediaError
from jaxvit.media import as_sequence, decode
from jaxvit.models.family import Family, Item
from jaxvit.models.pixels import uniform
from tests.families import encoder

RGB = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def gradient(height: int = 48, width: int = 64) -> np.ndarray:
    """Smooth and without any symmetry, so that JPEG keeps it."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) * 80 // width], axis=-1).astype(np.uint8)


def encoded(image: PIL.Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


PNG = encoded(PIL.Image.fromarray(RGB))


# Every form of the same pixels


def forms(folder: Path) -> dict[str, Any]:
    path = folder / "picture.png"
    path.write_bytes(PNG)
    return {
        "path": path,
        "str": str(path),
        "bytes": PNG,
        "bytearray": bytearray(PNG),
        "memoryview": memoryview(PNG),
        "BytesIO": io.BytesIO(PNG),
        "PIL": PIL.Image.fromarray(RGB),
        "PIL, not loaded": PIL.Image.open(io.BytesIO(PNG)),
        "array": RGB,
        "array, other order": np.asfortranarray(RGB),
        "array, read-only": np.frombuffer(RGB.tobytes(), np.uint8).reshape(RGB.shape),
        "Image hwc": Image(RGB),
        "Image chw": Image(RGB.transpose(2, 0, 1), layout="chw"),
    }


@pytest.mark.parametrize("form", range(13))
def test_every_form_of_a_picture_gives_the_same_pixels(form: int, tmp_path: Path):
    name, medium = list(forms(tmp_path).items())[form]
    found = decode(medium)
    assert isinstance(found, np.ndarray), name
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, RGB)


def test_an_open_file_is_read_from_its_start_and_left_where_it_was(tmp_path: Path):
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    with path.open("rb") as file:
        file.seek(7)
        for _ in range(2):
            np.testing.assert_array_equal(decode(file), RGB)
            assert file.tell() == 7


def test_a_stream_that_cannot_seek_is_read_once():
    class Stream:
        def __init__(self) -> None:
            self.rest = PNG

        def read(self) -> bytes:
            rest, self.rest = self.rest, b""
            return rest

    stream = Stream()
    np.testing.assert_array_equal(decode(stream), RGB)
    with pytest.raises(MediaError, match="nothing is in it"):
        decode(stream)


@pytest.mark.reference
def test_a_torch_tensor_needs_its_layout_declared():
    import torch

    tensor = torch.from_numpy(RGB.transpose(2, 0, 1).copy())
    np.testing.assert_array_equal(decode(Image(tensor, layout="chw")), RGB)
    with pytest.raises(MediaError, match=r"torch.Tensor: declare its layout, jaxvit.Image"):
        decode(tensor)
    with pytest.raises(MediaError, match=r"float32.*only uint8"):
        decode(Image(tensor.float(), layout="chw"))


def test_the_callers_array_is_only_read():
    array = RGB.copy()
    for medium in (array, Image(array), Video([array, array])):
        decode(medium)
    np.testing.assert_array_equal(array, RGB)


def test_an_item_passes_as_it_is():
    item = Item((), (), 0)
    assert decode(item, 3) is item


# Modes


def colour_modes() -> dict[str, tuple[PIL.Image.Image, np.ndarray]]:
    """Pictures of each mode without transparency, and their RGB pixels as Pillow has them."""
    image = PIL.Image.fromarray(gradient())
    modes = {mode: image.convert(mode) for mode in ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "RGBX")}
    return {mode: (one, np.asarray(one.convert("RGB"))) for mode, one in modes.items()}


@pytest.mark.parametrize("mode", colour_modes())
def test_a_mode_without_transparency_becomes_rgb_as_pillow_converts_it(mode: str):
    image, expected = colour_modes()[mode]
    assert image.mode == mode
    np.testing.assert_array_equal(decode(image), expected)


@pytest.mark.parametrize(
    ("mode", "format"), [("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG")]
)
def test_a_file_of_a_mode_gives_the_pixels_of_its_decoded_image(mode: str, format: str):
    data = encoded(colour_modes()[mode][0], format)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert image.mode == mode
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode(data), expected)


@pytest.mark.parametrize("shape", [(40, 60), (40, 60, 1)], ids=str)
def test_a_gray_array_is_three_equal_channels(shape: tuple[int, ...]):
    gray = RGB[..., 0].reshape(shape)
    np.testing.assert_array_equal(decode(gray), np.repeat(RGB[..., :1], 3, axis=2))
    np.testing.assert_array_equal(decode(PIL.Image.fromarray(RGB[..., 0])), decode(gray))


def test_16_bit_gray_is_scaled_and_rounded():
    wide = np.array([[0, 128, 129, 257, 32768, 65407, 65535]], np.uint16)
    expected = np.rint(wide / 257).astype(np.uint8)
    for data in (encoded(PIL.Image.fromarray(wide)), encoded(PIL.Image.fromarray(wide), "TIFF")):
        found = decode(data)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_known_range_are_refused(mode: str):
    with pytest.raises(MediaError, match=rf"item 2: PIL image of mode {mode}: .*no known range: convert it to 8 bits"):
        decode(PIL.Image.new(mode, (4, 4)), 2)


def test_a_mode_that_pillow_cannot_convert_is_refused(monkeypatch: pytest.MonkeyPatch):
    def convert(self: PIL.Image.Image, mode: str) -> None:
        raise ValueError(f"conversion from {self.mode} to {mode} not supported")

    monkeypatch.setattr(PIL.Image.Image, "convert", convert)  # which modes these are differs between releases
    with pytest.raises(MediaError, match=r"mode LAB cannot become RGB .*not supported.*: convert it first"):
        decode(PIL.Image.new("LAB", (4, 4)))


# Transparency


def transparent() -> dict[str, tuple[Any, tuple[int, int, int]]]:
    """Pictures of one colour and what they become on white."""

    def palette(index: int) -> bytes:
        image = PIL.Image.new("P", (56, 56), index)
        image.putpalette([0, 0, 0, 200, 100, 50])
        return encoded(image, transparency=0)

    def gif() -> bytes:
        image = PIL.Image.new("P", (56, 56), 0)
        image.putpalette([0, 0, 0, 200, 100, 50])
        return encoded(image, "GIF", transparency=0)

    pa = PIL.Image.new("RGBA", (56, 56), (0, 0, 0, 0)).convert("PA")
    return {
        "clear black": (PIL.Image.new("RGBA", (56, 56), (0, 0, 0, 0)), (255, 255, 255)),
        "clear white": (PIL.Image.new("RGBA", (56, 56), (255, 255, 255, 0)), (255, 255, 255)),
        "half red": (PIL.Image.new("RGBA", (56, 56), (255, 0, 0, 128)), (255, 127, 127)),
        "opaque": (PIL.Image.new("RGBA", (56, 56), (10, 20, 30, 255)), (10, 20, 30)),
        "half red array": (np.full((56, 56, 4), (255, 0, 0, 128), np.uint8), (255, 127, 127)),
        "half red, channels first": (
            Image(np.full((56, 56, 4), (255, 0, 0, 128), np.uint8).transpose(2, 0, 1), "chw"),
            (255, 127, 127),
        ),
        "palette, its clear colour": (palette(0), (255, 255, 255)),
        "palette, another colour": (palette(1), (200, 100, 50)),
        "palette of a gif": (gif(), (255, 255, 255)),
        "gray, clear": (PIL.Image.new("LA", (56, 56), (0, 0)), (255, 255, 255)),
        "gray, opaque": (PIL.Image.new("LA", (56, 56), (77, 255)), (77, 77, 77)),
        "palette with alpha": (pa, (255, 255, 255)),
        "premultiplied": (PIL.Image.new("RGBa", (56, 56), (0, 0, 0, 0)), (255, 255, 255)),
        "premultiplied gray": (PIL.Image.new("LA", (56, 56), (0, 0)).convert("La"), (255, 255, 255)),
        "colour key": (encoded(PIL.Image.new("RGB", (56, 56), (1, 2, 3)), transparency=(1, 2, 3)), (255, 255, 255)),
        "gray key": (encoded(PIL.Image.new("L", (56, 56), 9), transparency=9), (255, 255, 255)),
        "16-bit gray key": (sixteen_bit_with_key(), (255, 255, 255)),
    }


def sixteen_bit_with_key() -> bytes:
    """A 16-bit gray PNG whose one value is declared transparent (Pillow does not write these)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + struct.pack(">H", 5000) * 56) * 56
    header = struct.pack(">IIBBBBB", 56, 56, 16, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", 5000)) + chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", transparent())
def test_transparency_is_composited_on_white(kind: str):
    medium, colour = transparent()[kind]
    found = decode(medium)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.full((56, 56, 3), colour, np.uint8))


def test_an_array_and_an_image_of_the_same_transparent_pixels_agree():
    rgba = np.random.default_rng(1).integers(0, 256, (40, 60, 4), np.uint8)
    np.testing.assert_array_equal(decode(rgba), decode(PIL.Image.fromarray(rgba)))


@pytest.mark.reference
def test_transparent_pixels_are_those_of_the_reference():
    from transformers.image_transforms import convert_to_rgb

    for medium, _ in transparent().values():
        # The reference takes premultiplied images for opaque ones.
        if isinstance(medium, PIL.Image.Image) and not medium.mode.endswith("a"):
            np.testing.assert_array_equal(decode(medium), convert_to_rgb(medium, return_numpy=True))


# Orientation


def oriented(tag: int, **options: Any) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = tag
    return encoded(PIL.Image.fromarray(gradient()), "JPEG", exif=exif, quality=95, **options)


BAKED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("tag", BAKED)
def test_the_exif_orientation_is_applied_to_files_bytes_and_opened_images(tag: int, tmp_path: Path):
    data = oriented(tag)
    with PIL.Image.open(io.BytesIO(data)) as stored:
        expected = BAKED[tag](np.asarray(stored))
        np.testing.assert_array_equal(decode(stored), expected)
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    for medium in (data, path, io.BytesIO(data)):
        np.testing.assert_array_equal(decode(medium), expected)


@pytest.mark.parametrize("tag", BAKED)
def test_the_orientation_is_pillows_own(tag: int):
    from PIL import ImageOps

    with PIL.Image.open(io.BytesIO(oriented(tag))) as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored))
    np.testing.assert_array_equal(decode(oriented(tag)), expected)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage that is no TIFF", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"])
def test_an_exif_block_that_cannot_be_read_counts_as_none(exif: bytes):
    image = PIL.Image.fromarray(gradient())
    data = encoded(image, "JPEG", exif=exif, quality=95)
    with PIL.Image.open(io.BytesIO(encoded(image, "JPEG", quality=95))) as plain:
        np.testing.assert_array_equal(decode(data), np.asarray(plain))


def test_an_unknown_orientation_counts_as_none():
    np.testing.assert_array_equal(decode(oriented(9)), decode(oriented(1)))


# Animations and damage


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_or_document_gives_its_first_picture(format: str):
    frames = [PIL.Image.new("RGB", (56, 56), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == 3
    np.testing.assert_array_equal(decode(data), np.full((56, 56, 3), (255, 0, 0), np.uint8))


def test_an_opened_animation_is_taken_at_the_frame_where_it_stands():
    frames = [PIL.Image.new("RGB", (56, 56), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    with PIL.Image.open(io.BytesIO(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))) as image:
        image.seek(1)
        np.testing.assert_array_equal(decode(image), np.full((56, 56, 3), (0, 255, 0), np.uint8))
        assert image.tell() == 1


def bomb() -> bytes:
    """A 1-bit PNG of 20000 x 20000 pixels in a few KiB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(2501) * 20000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def huge_text() -> bytes:
    """A PNG with a compressed text chunk that unpacks to more than Pillow allows."""
    data = b"Comment\0\0" + zlib.compress(bytes(80 << 20), 9)
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return PNG[:33] + chunk + PNG[33:]


JPEG = encoded(PIL.Image.fromarray(np.random.default_rng(2).integers(0, 256, (400, 600, 3), np.uint8)), "JPEG")


class HostileReader:
    @property
    def read(self) -> Any:
        raise ZeroDivisionError("touched")


class HostileFile(io.BytesIO):
    @property
    def name(self) -> Any:
        raise ZeroDivisionError("touched")


class HostilePath:
    def __fspath__(self) -> Any:
        return 5


def released() -> memoryview:
    view = memoryview(PNG)
    view.release()
    return view


def wide(*shape: int) -> np.ndarray:
    """An array over Pillow's limit in three bytes of memory."""
    return np.broadcast_to(np.uint8(7), shape)


BAD: dict[str, tuple[Any, str]] = {
    "property that raises": (HostileReader(), "HostileReader cannot be read .ZeroDivisionError: touched.: pass"),
    "name that raises": (HostileFile(PNG), "HostileFile cannot be read .ZeroDivisionError: touched.: pass"),
    "path that is none": (HostilePath(), "HostilePath cannot be read .TypeError.*: pass"),
    "released memory": (released(), "memoryview cannot be read .ValueError.*: pass"),
    "array over the limit": (wide(60000, 60000, 3), "60000 x 60000 pixels, the limit is .*: shrink it first"),
    "gray array over the limit": (wide(60000, 60000), "60000 x 60000 pixels, the limit is .*: shrink it first"),
    "RGBA array over the limit": (wide(10**9, 10**4, 4), "1000000000 x 10000 pixels.*: shrink it first"),
    "chw array over the limit": (Image(wide(3, 10**6, 10**6), "chw"), "1000000 x 1000000 pixels.*: shrink it first"),
    "None": (None, "None is no picture: leave it out"),
    "empty bytes": (b"", "0 bytes: nothing is in it: pass a whole image file"),
    "empty file": (io.BytesIO(b""), "file 'BytesIO': nothing is in it"),
    "text": (b"hello, this is no image", "23 bytes: not an image that Pillow reads: pass JPEG, PNG"),
    "cut JPEG": (JPEG[: len(JPEG) * 6 // 10], "cut off or damaged .*: pass a whole image file"),
    "cut PNG": (PNG[: len(PNG) // 2], "cut off or damaged .*: pass a whole image file"),
    "PNG header alone": (PNG[:33], "not an image that Pillow reads"),
    "bomb": (bomb(), "pixels.*: shrink it first"),
    "huge text chunk": (huge_text(), "cut off or damaged .*(?i:too large)"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "Git LFS pointer.*lfs pull",
    ),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "EPS is a program.*render it"),
    "missing path": ("no/such/picture.jpg", "path 'no/such/picture.jpg' cannot be read .*: check the path"),
    "folder": (Path("."), "path '.' is a folder: pass the paths of its files"),
    "URL": ("https://example.org/cat.jpg", "is a URL, and nothing is fetched: pass the bytes"),
    "data URL": ("data:image/png;base64,AAAA", "is a URL, and nothing is fetched: pass the bytes"),
    "path with a zero": ("a\0b", "cannot be read"),
    "text file": (io.StringIO("x"), "gives str, not bytes: open the file with 'rb'"),
    "number": (3, "int is no picture: pass a path"),
    "list": ([RGB, RGB], "a list inside the sequence: a video's frames go in as jaxvit.Video"),
    "float array": (RGB / 255, r"array float64\[40, 60, 3\]: only uint8 arrays are taken: convert it"),
    "uint16 array": (RGB.astype(np.uint16), r"array uint16\[40, 60, 3\]: .*// 257"),
    "bool array": (RGB > 128, r"array bool\[40, 60, 3\]: only uint8"),
    "4-D array": (RGB[None], r"array uint8\[1, 40, 60, 3\]: 4 axes: pass list\(array\).*Video\(array\)"),
    "1-D array": (RGB.reshape(-1), r"array uint8\[7200\]: not \[height, width, 3\]"),
    "chw array": (RGB.transpose(2, 0, 1), r"array uint8\[3, 40, 60\]: not .*Image\(array, layout='chw'\)"),
    "two channels": (RGB[..., :2], r"array uint8\[40, 60, 2\]: not \[height, width, 3\]"),
    "empty array": (RGB[:0], r"array uint8\[0, 60, 3\]: an empty array: leave it out"),
    "wrong layout name": (Image(RGB, layout="HWC"), "Image: layout is 'HWC': declare 'hwc' or 'chw'"),
    "declared chw, is hwc": (Image(RGB, layout="chw"), r"Image of layout chw uint8\[60, 3, 40\]: not"),
    "declared object": (Image("cat.jpg"), "Image of layout hwc <U7.*only uint8"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_refused_naming_place_kind_and_remedy(kind: str):
    medium, words = BAD[kind]
    with pytest.raises(MediaError, match=words) as caught:
        decode(medium, 7)
    assert str(caught.value).startswith("item 7: ")
    assert caught.value.index == 7
    np.testing.assert_array_equal(decode(PNG), RGB)  # and nothing else breaks


@pytest.mark.parametrize("wall", [True, False], ids=["warnings are errors", "warnings are shown"])
def test_a_picture_between_pillows_limit_and_its_error_is_refused_too(wall: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 40 * 60 - 1)
    if wall:
        with pytest.raises(MediaError, match=r"raise PIL.Image.MAX_IMAGE_PIXELS if you trust"):
            decode(PNG)
    else:
        with (
            pytest.warns(PIL.Image.DecompressionBombWarning),
            pytest.raises(MediaError, match=r"40 x 60 pixels, the limit is 2399"),
        ):
            decode(PNG)
    with pytest.raises(MediaError, match="the limit is 2399"):
        decode(PIL.Image.fromarray(RGB))
    assert PIL.Image.MAX_IMAGE_PIXELS == 2399


def test_a_limit_that_the_user_took_away_stays_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    np.testing.assert_array_equal(decode(PNG), RGB)


def test_a_damaged_file_at_any_byte_is_our_error_or_a_picture():
    generator = np.random.default_rng(3)
    sources = [
        PNG,
        oriented(6),
        encoded(PIL.Image.fromarray(RGB).convert("P"), "GIF"),
        encoded(PIL.Image.fromarray(RGB), "BMP"),
    ]
    sources += [encoded(PIL.Image.fromarray(RGB), "WEBP"), encoded(PIL.Image.fromarray(RGB), "TIFF")]
    refused = taken = 0
    for number in range(300):
        data = bytearray(sources[number % len(sources)])
        for _ in range(generator.integers(1, 8)):
            data[generator.integers(0, len(data))] = generator.integers(0, 256)
        if number % 3 == 0:
            data = data[: generator.integers(0, len(data))]
        try:
            found = decode(bytes(data), number)
        except MediaError:
            refused += 1
        else:
            assert isinstance(found, np.ndarray)
            assert found.dtype == np.uint8
            assert found.ndim == 3
            assert found.shape[2] == 3
            taken += 1
    assert refused > 50
    assert taken > 50


def test_one_lazy_image_and_one_open_file_may_stand_in_many_threads():
    image, file = PIL.Image.open(io.BytesIO(JPEG)), io.BytesIO(JPEG)
    expected = decode(JPEG)
    wrong: list[Any] = []

    def work() -> None:
        for medium in (image, file):
            try:
                if not np.array_equal(decode(medium), expected):  # pyright: ignore
                    wrong.append(medium)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Sequences


def test_one_medium_is_a_call_of_one_item(tmp_path: Path):
    for medium in [*forms(tmp_path).values(), Video([RGB]), Item((), (), 0)]:
        [found] = as_sequence(medium)
        assert found is medium


def test_lists_tuples_and_iterators_are_calls_of_many_items():
    for media in ([PNG, RGB], (PNG, RGB), iter([PNG, RGB])):
        found = as_sequence(media)
        assert len(found) == 2
        assert found[1] is RGB
    assert as_sequence([]) == []
    assert as_sequence(None) == [None]


def test_a_processors_output_is_sent_to_items():
    with pytest.raises(MediaError, match=r"goes through encoder.items"):
        as_sequence({"pixel_values": RGB})


# Videos


def test_frames_are_taken_as_given_in_order():
    frames = [RGB, PIL.Image.fromarray(RGB[::-1]), Image(RGB.transpose(2, 0, 1), "chw")]
    found = decode(Video(frames, fps=30.0, timestamps=[0, 1, 5], prune=0.25))
    assert isinstance(found, Video)
    assert len(found.frames) == 3
    for frame, expected in zip(found.frames, (RGB, RGB[::-1], RGB), strict=True):
        np.testing.assert_array_equal(frame, expected)
    assert (found.fps, found.timestamps, found.prune) == (30.0, (0.0, 1.0, 5.0), 0.25)


def test_thirty_frames_stay_thirty_whatever_their_rate():
    for fps in (30, None):
        found = decode(Video(np.stack([RGB] * 30), fps=fps))
        assert isinstance(found, Video)
        assert len(found.frames) == 30


def test_frames_from_an_iterator_can_be_encoded_twice():
    video = Video(frame for frame in [RGB, RGB])
    for _ in range(2):
        found = decode(video)
        assert isinstance(found, Video)
        assert len(found.frames) == 2


def failing() -> Iterator[np.ndarray]:
    yield RGB
    raise ZeroDivisionError("decoder")


class FailingClip:
    def __iter__(self) -> Iterator[np.ndarray]:
        return failing()


BAD_VIDEOS: dict[str, tuple[Video, str]] = {
    "frames that raise": (Video(FailingClip()), "Video cannot be read .ZeroDivisionError: decoder.: pass"),
    "one picture": (Video(RGB), r"an array \[40, 60, 3\] is one picture: pass a list of such, or an array \[frames"),
    "fps beyond a float": (Video([RGB], fps=10**400), "fps is 1000.*: give frames a second"),
    "fps beyond any clip": (Video([RGB], fps=5e-324), "fps is 5e-324: give frames a second"),
    "timestamps beyond a float": (Video([RGB], timestamps=[10**400]), "timestamps are not numbers"),
    "no frames": (Video([]), "Video: no frames: pass at least one"),
    "unequal sizes": (Video([RGB, RGB, RGB[:20]]), "frame 0 is 40 x 60, frame 2 is 20 x 60: make all frames one size"),
    "bad frame": (Video([RGB, None]), "Video, frame 1: None is no picture"),
    "fps 0": (Video([RGB], fps=0), "fps is 0: give frames a second, more than 0"),
    "fps negative": (Video([RGB], fps=-2.0), "fps is -2.0"),
    "fps nan": (Video([RGB], fps=float("nan")), "fps is nan"),
    "fps infinite": (Video([RGB], fps=float("inf")), "fps is inf"),
    "fps true": (Video([RGB], fps=True), "fps is True"),
    "timestamps too many": (Video([RGB], timestamps=[0, 1]), "1 frames and 2 timestamps: give one a frame"),
    "timestamps fall": (Video([RGB, RGB], timestamps=[1, 0]), "timestamps fall or are not finite"),
    "timestamps nan": (Video([RGB], timestamps=[float("nan")]), "timestamps fall or are not finite"),
    "timestamps words": (Video([RGB], timestamps=["a"]), "timestamps are not numbers"),
    "prune 1": (Video([RGB], prune=1), "prune is 1: give the share of tokens to drop"),
    "prune negative": (Video([RGB], prune=-0.1), "prune is -0.1"),
    "prune nan": (Video([RGB], prune=float("nan")), "prune is nan"),
    "a path": (Video("clip.mp4"), r"'clip.mp4' is no list of frames: a file goes in as jaxvit.Video.open\(path\)"),
    "a number": (Video(3), "Video: int is no sequence of frames"),
}


@pytest.mark.parametrize("kind", BAD_VIDEOS)
def test_a_bad_video_is_refused_naming_place_and_remedy(kind: str):
    video, words = BAD_VIDEOS[kind]
    with pytest.raises(MediaError, match=words) as caught:
        decode(video, 4)
    assert str(caught.value).startswith("item 4: ")


def test_timestamps_from_an_iterator_can_be_read_twice():
    video = Video([RGB, RGB], timestamps=iter([0, 1]))
    assert [decode(video).timestamps for _ in range(2)] == [(0.0, 1.0)] * 2  # type: ignore[union-attr]


# Files whose reading would not end


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("video", [False, True], ids=["picture", "video"])
def test_what_is_no_file_is_refused_and_never_waited_for(kind: str, video: bool, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("x.png")
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        else:
            path.symlink_to("/dev/zero")
        if video:
            pytest.importorskip("av")
        with pytest.raises(MediaError, match=r"item 3: .*a pipe, a device or a socket, not a file.: check the path"):
            decode(Video.open(path) if video else path, 3)


def test_a_file_that_no_picture_fills_is_refused_unread(tmp_path: Path):
    path = tmp_path / "sparse.png"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(MediaError, match=r"item 3: path .*sparse.png' is larger than 1024 MiB.*: open it with PIL"):
        decode(path, 3)


# Video files


def movie(path: Path, frames: int = 30, rate: int = 10, size: tuple[int, int] = (64, 96)) -> Path:
    """A lossless clip whose frame i is gray 8 * i."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *size, "bgr0"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), 8 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("suffix", ["mkv", "avi"])
@pytest.mark.parametrize(("fps", "count"), [(2.0, 6), (None, 6), (10, 30), (100, 30), (0.1, 1)])
def test_a_file_is_sampled_at_the_rate_that_is_asked_for(tmp_path: Path, fps: float | None, count: int, suffix: str):
    video = Video.open(movie(tmp_path / f"clip.{suffix}"), fps=fps, prune=0.5)
    found = decode(video)
    assert isinstance(found, Video)
    places = uniform(30, 10.0, None if fps is None else float(fps))
    assert len(found.frames) == len(places) == count
    assert [int(frame[0, 0, 0]) for frame in found.frames] == [8 * place for place in places]
    assert all(frame.shape == (64, 96, 3) for frame in found.frames)
    assert found.timestamps == tuple(place / 10 for place in places)
    assert found.fps == pytest.approx(count / 3)
    assert found.prune == 0.5


def test_the_familys_sampler_chooses_the_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def sample(family: Family, total: int, native: float, fps: float | None) -> list[int]:
        asked.append((total, native, fps))
        return [3, 1]

    family = encoder("qwen2_5_vl").family
    monkeypatch.setattr(type(family), "sample_frames", sample)
    found = decode(Video.open(str(movie(tmp_path / "clip.mkv")), fps=5), family=family)
    assert isinstance(found, Video)
    assert asked == [(30, 10.0, 5)]
    assert [int(frame[0, 0, 0]) for frame in found.frames] == [8, 24]
    assert found.timestamps == (0.1, 0.3)


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_family_without_video_opens_no_file_and_no_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Literal["raise", "return"]
):
    monkeypatch.setitem(sys.modules, "av", None)  # what would read a file: importing it fails
    media = [RGB, Video.open(tmp_path / "missing.mkv"), Video([tmp_path / "missing.jpg"])]
    words = "lfm2_vl has no video input; pass the frames as images"
    if on_error == "return":
        good, *refused = encoder("lfm2_vl").prepare(media, on_error="return")
        assert isinstance(good, Item)
        assert [str(one) for one in refused] == [f"item 1: {words}", f"item 2: {words}"]
    else:
        with pytest.raises(MediaError, match="2 items cannot be encoded") as caught:
            encoder("lfm2_vl").prepare(media)
        assert {index: str(error) for index, error in caught.value.errors.items()} == {
            1: f"item 1: {words}",
            2: f"item 2: {words}",
        }


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_an_absurd_rate_for_a_file_is_refused(tmp_path: Path, fps: float):
    with pytest.raises(MediaError, match=r"fps is .*: give frames a second, more than 0, or leave it out"):
        decode(Video.open(tmp_path / "clip.mkv", fps=fps))


@pytest.mark.parametrize("kind", ["missing", "text", "empty", "cut", "sound"])
def test_a_bad_video_file_is_refused_naming_it(tmp_path: Path, kind: str):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mkv"
    if kind == "sound":
        path = tmp_path / "clip.wav"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
    elif kind != "missing":
        data = {"text": b"no video", "empty": b""}.get(kind)
        path.write_bytes(movie(tmp_path / "whole.mkv").read_bytes()[:200] if data is None else data)
    with pytest.raises(MediaError, match=rf"item 1: video '.*{path.name}'") as caught:
        decode(Video.open(path), 1)
    assert isinstance(caught.value, JaxvitError)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    from jaxvit.errors import DependencyError

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DependencyError, match=r"pip install 'jaxvit\[video\]'"):
        decode(Video.open("clip.mp4"))


RACE = """
import io, sys, threading
from jaxvit.media import decode
data, barrier, refused = sys.stdin.buffer.read(), threading.Barrier(16), []

def work():
    barrier.wait()
    try:
        decode(data)
    except Exception as error:
        refused.append(error)

threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not refused, refused[0]
"""


def test_16_threads_of_a_fresh_process_decode_their_first_webp_together():
    import subprocess
    import sys

    data = encoded(PIL.Image.fromarray(RGB), "WEBP")
    run = subprocess.run([sys.executable, "-c", RACE], input=data, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()


def test_readers_are_registered_before_a_file_is_opened(monkeypatch: pytest.MonkeyPatch):
    """Pillow registers the readers of rarer formats when the first such file is opened, which threads could race."""
    steps: list[str] = []
    init, opening = PIL.Image.init, PIL.Image.open
    monkeypatch.setattr(PIL.Image, "init", lambda: (steps.append("init"), init())[1])
    monkeypatch.setattr(PIL.Image, "open", lambda file: (steps.append("open"), opening(file))[1])
    decode(PNG)
    assert steps[:2] == ["init", "open"]


def test_a_user_who_asks_pillow_for_the_rest_of_cut_files_gets_it(monkeypatch: pytest.MonkeyPatch):
    from PIL import ImageFile

    cut = JPEG[: len(JPEG) * 6 // 10]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = decode(cut)
    assert isinstance(found, np.ndarray)
    assert found.shape == (400, 600, 3)
    np.testing.assert_array_equal(found[:100], decode(JPEG)[:100])  # pyright: ignore
