"""Pictures of every kind -> RGB uint8 arrays. The rules stand in :mod:`jaxvit.media`."""

from __future__ import annotations

import io
import os
import stat
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from jaxvit.errors import MediaError

MOST_BYTES = 2**30
"""Bytes of a file at most: a picture at Pillow's limit has fewer, and a larger file may not fit the memory."""
_LOCKS = [threading.Lock() for _ in range(16)]
"""An opened file or lazily loaded PIL image may stand in several threads' calls, and must be read by one at a time."""


@dataclass(frozen=True, eq=False)
class Image:
    """An array with a declared layout: uint8, "hwc" [height, width, channels] or "chw" [channels, height, width].

    ``array`` may be numpy's, or another library's in host memory (a torch tensor on the CPU).
    """

    array: Any
    layout: str = "hwc"


def picture(medium: Any) -> np.ndarray:
    """RGB uint8 [height, width, 3] of anything but a video."""
    if isinstance(medium, (str, os.PathLike)):
        return _from_path(os.fspath(medium))
    if isinstance(medium, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(medium), f"{len(medium)} bytes")
    if isinstance(medium, PIL.Image.Image):
        with _lock(medium):
            return _from_pil(medium, f"PIL image of mode {medium.mode}")
    if isinstance(medium, np.ndarray):
        return _from_array(np.asarray(medium), "array")
    if isinstance(medium, Image):
        return _from_declared(medium)
    if hasattr(medium, "read"):
        return _from_file(medium)
    if medium is None:
        raise MediaError("None is no picture: leave it out, or put a picture in its place")
    if isinstance(medium, (list, tuple)):
        raise MediaError(
            f"a {type(medium).__name__} inside the sequence: a video's frames go in as jaxvit.Video(frames)"
        )
    if hasattr(medium, "__array__"):
        raise MediaError(f"{kind_of(medium)}: declare its layout, jaxvit.Image(array, layout='hwc') or 'chw'")
    raise MediaError(
        f"{kind_of(medium)} is no picture: pass a path, bytes, a binary file, a PIL image, a uint8 array [h, w, 3], "
        "jaxvit.Image or jaxvit.Video"
    )


def kind_of(medium: Any) -> str:
    kind = type(medium)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _lock(medium: Any) -> threading.Lock:
    return _LOCKS[(id(medium) >> 5) % len(_LOCKS)]


def no_file(path: str) -> str | None:
    """Why reading the path may never end, None where it is a file or a folder, or nothing at all."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return None
    return "it is a pipe, a device or a socket, not a file"


def _from_path(path: str | bytes) -> np.ndarray:
    path = os.fsdecode(path)
    if path.startswith(("http://", "https://", "data:")):
        raise MediaError(f"{path[:60]!r} is a URL, and nothing is fetched: pass the bytes of the file")
    if fault := no_file(path):
        raise MediaError(f"path {path[:300]!r} cannot be read ({fault}): check the path, or pass an open binary file")
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise MediaError(
                    f"path {path!r} is larger than {MOST_BYTES >> 20} MiB, which no picture is: open it with PIL and "
                    "pass the image, or (a video) pass jaxvit.Video.open(path)"
                )
            data = file.read()
    except MediaError:
        raise
    except (OSError, ValueError) as error:
        if os.path.isdir(path):
            raise MediaError(f"path {path[:300]!r} is a folder: pass the paths of its files") from error
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(f"path {path[:300]!r} cannot be read ({reason}): check the path") from error
    return _from_bytes(data, f"path {path!r}")


def _from_file(file: Any) -> np.ndarray:
    with _lock(file):
        try:
            if hasattr(file, "seekable") and file.seekable():
                position = file.tell()
                try:
                    file.seek(0)
                    data = file.read()
                finally:
                    file.seek(position)
            else:
                data = file.read()
        except Exception as error:
            raise MediaError(f"{kind_of(file)} cannot be read ({error}): pass an open binary file") from error
    if not isinstance(data, (bytes, bytearray)):
        raise MediaError(f"{kind_of(file)} gives {type(data).__name__}, not bytes: open the file with 'rb'")
    return _from_bytes(bytes(data), f"file {str(getattr(file, 'name', type(file).__name__))!r}")


def _from_bytes(data: bytes, what: str) -> np.ndarray:
    if not data:
        raise MediaError(f"{what}: nothing is in it: pass a whole image file")
    if data.startswith(b"version https://git-lfs"):
        raise MediaError(f"{what}: a Git LFS pointer and not the image: fetch it with git lfs pull")
    PIL.Image.init()  # else threads that meet a first WebP or TIFF at once may find its reader half registered
    try:
        image = PIL.Image.open(io.BytesIO(data))
    except PIL.UnidentifiedImageError as error:
        raise MediaError(
            f"{what}: not an image that Pillow reads: pass JPEG, PNG, WebP, GIF or the like (a video goes in as "
            "jaxvit.Video.open(path))"
        ) from error
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(what, str(error)) from error
    except Exception as error:
        raise _broken(what, error) from error
    with image:
        return _from_pil(image, what)


def _from_pil(image: PIL.Image.Image, what: str) -> np.ndarray:
    width, height = image.size
    _check_size(width, height, what)
    if not width or not height:
        raise MediaError(f"{what}: {height} x {width} pixels, so nothing to encode: leave it out")
    if image.format == "EPS":
        raise MediaError(f"{what}: EPS is a program that would have to be run: render it to pixels first")
    try:
        image.load()
    except Exception as error:
        raise _broken(what, error) from error
    try:
        return np.asarray(_rgb(_upright(image), what))
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"{what}: mode {image.mode} cannot become RGB ({error}): convert it first") from error


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """The EXIF orientation applied. Pillow's own function also rewrites the EXIF block, and fails on a bad one."""
    turns = PIL.Image.Transpose
    methods = {2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE}
    methods |= {6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90}
    try:
        method = methods.get(image.getexif().get(0x0112, 1))
    except Exception:
        return image
    return image if method is None else image.transpose(method)


def _rgb(image: PIL.Image.Image, what: str) -> PIL.Image.Image:
    """RGB, transparency composited on white."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):
        sixteen = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")  # older Pillow opens these as I
        if not sixteen:
            raise MediaError(f"{what}: mode {image.mode} has no known range: convert it to 8 bits a channel first")
        wide = np.asarray(image).astype(np.uint32)
        gray = ((wide * 255 + 32767) // 65535).astype(np.uint8)
        if isinstance(transparent, int):
            gray[wide == transparent] = 255
        return PIL.Image.fromarray(gray).convert("RGB")
    if image.mode == "F":
        raise MediaError(f"{what}: mode F has no known range: convert it to 8 bits a channel first")
    if image.mode == "La":
        image = image.convert("LA")
    if transparent is None and not {"A", "a"} & set(image.getbands()):
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return PIL.Image.alpha_composite(white, image).convert("RGB")


def _from_declared(image: Image) -> np.ndarray:
    if not isinstance(image.layout, str) or image.layout not in ("hwc", "chw"):
        raise MediaError(f"Image: layout is {image.layout!r}: declare 'hwc' or 'chw'")
    what = f"Image of layout {image.layout}"
    try:
        array = np.asarray(image.array)
    except Exception as error:
        raise MediaError(
            f"{what}: {kind_of(image.array)} is no array in host memory ({error}): copy it there"
        ) from error
    if image.layout == "chw" and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    return _from_array(array, what)


def _from_array(array: np.ndarray, what: str) -> np.ndarray:
    what = f"{what} {array.dtype}{list(array.shape)}"
    if array.dtype != np.uint8:
        remedy = "np.clip(array * 255, 0, 255).round().astype(np.uint8) if its values are 0 to 1"
        if array.dtype == np.uint16:
            remedy = "(array // 257).astype(np.uint8) if its values are 0 to 65535"
        raise MediaError(f"{what}: only uint8 arrays are taken: convert it, {remedy}")
    if array.ndim == 4:
        raise MediaError(f"{what}: 4 axes: pass list(array) for several pictures, or jaxvit.Video(array) for a clip")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise MediaError(
            f"{what}: not [height, width, 3]: if its channels come first, pass jaxvit.Image(array, layout='chw')"
        )
    if not array.size:
        raise MediaError(f"{what}: an empty array: leave it out")
    _check_size(array.shape[1], array.shape[0], what)
    if array.shape[2] == 1:
        return np.broadcast_to(array, (*array.shape[:2], 3))
    if array.shape[2] == 4:
        return np.asarray(_rgb(PIL.Image.fromarray(np.ascontiguousarray(array)), what))
    return array


def _check_size(width: int, height: int, what: str) -> None:
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise _too_large(what, f"{height} x {width} pixels, the limit is {limit}")


def _too_large(what: str, detail: str) -> MediaError:
    return MediaError(
        f"{what}: {detail}: shrink it first, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust where it comes from"
    )


def _broken(what: str, error: Exception) -> MediaError:
    return MediaError(f"{what}: cut off or damaged ({type(error).__name__}: {error}): pass a whole image file")
