"""What a user passes -> RGB uint8 pictures.

**Pictures.** A path (``str`` or ``pathlib.Path``), ``bytes`` of an image file, a binary file object (read from its
start, its position put back), a PIL image, a uint8 array, or ``jaxvit.Image(array, layout="hwc" | "chw")``.

- A bare numpy array is uint8 [height, width, 3] (RGB), [height, width, 4] (RGBA), [height, width, 1] or
  [height, width] (gray). Its layout is never guessed: channels first needs ``Image(array, layout="chw")``, and an array
  of another library (a torch tensor on the CPU) needs ``Image`` too. Other dtypes and more axes are refused.
- Files are decoded by Pillow: the first frame of an animation, the first page of a document, no colour profile applied.
  A PIL image is taken at the frame at which it stands.
- The EXIF orientation is applied, for an opened PIL image as for its file: both give the same embeddings. An EXIF block
  that cannot be read counts as none.
- Transparency (RGBA, LA, PA, palettes and colours declared transparent, a fourth channel of an array) is composited on
  white, before the resize.
- Gray, 1-bit, palette, CMYK and YCbCr become RGB as Pillow converts them. 16-bit gray is scaled by 255/65535 and
  rounded. 32-bit integers and floats have no known range and are refused.
- A picture over Pillow's limit (``PIL.Image.MAX_IMAGE_PIXELS``, half of where Pillow itself gives up) is refused before
  it is decoded. The limit is only read here, never set.
- Cut-off, empty and foreign files are refused, and so are URLs: nothing is ever fetched.

**Videos.** ``jaxvit.Video(frames)`` takes its frames as they are, never resampled; each is a picture as above, all of
one size. ``fps`` and ``timestamps`` (seconds, one a frame) only fill ``Item.layout``. ``Video.open(path, fps=...)``
samples a file as the model family's reference does; it needs the extra ``video``.

A refused item raises MediaError, which names its place, what it is and what to do. The caller's arrays are only read.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import PIL.ImageOps

from jaxvit.errors import DependencyError, MediaError
from jaxvit.models.family import Item
from jaxvit.models.pixels import uniform

Sampler = Callable[[int, float, float | None], Sequence[int]]
"""(frames of the file, its frames a second, wanted frames a second or None) -> the frames to take."""

_LOCKS = [threading.Lock() for _ in range(16)]
"""An opened file or lazily loaded PIL image may stand in several threads' calls, and must be read by one at a time."""


@dataclass(frozen=True, eq=False)
class Image:
    """An array with a declared layout: uint8, "hwc" [height, width, channels] or "chw" [channels, height, width].

    ``array`` may be numpy's, or another library's in host memory (a torch tensor on the CPU).
    """

    array: Any
    layout: Literal["hwc", "chw"] = "hwc"


@dataclass(frozen=True, eq=False, init=False)
class Video:
    """A clip: frames as given, or a file to be sampled.

    Args:
        frames: pictures of one size, at least one; a uint8 array [frames, height, width, 3] is such a sequence.
        fps: frames a second of these frames, if known.
        timestamps: seconds, one a frame, not falling.
        prune: share of the tokens to drop after encoding, from 0 (none) to less than 1, where the family can.
    """

    frames: Any
    fps: float | None
    timestamps: Any
    prune: float
    path: str | None

    def __init__(self, frames: Any, *, fps: float | None = None, timestamps: Any = None, prune: float = 0.0):
        self._set(frames, fps, timestamps, prune, None)

    def _set(self, *values: Any) -> None:
        for name, value in zip(("frames", "fps", "timestamps", "prune", "path"), values, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, fps: float | None = None, prune: float = 0.0) -> Video:
        """A video file, read when it is encoded (extra ``video``).

        Args:
            fps: frames a second to take; None takes the model family's own rate.
        """
        video = cls.__new__(cls)
        video._set((), fps, None, prune, os.fspath(path))
        return video


def as_sequence(media: Any) -> list[Any]:
    """The items of a call: those of a list, tuple or other iterable, or the one item that was passed."""
    single = (str, bytes, bytearray, memoryview, os.PathLike, np.ndarray, PIL.Image.Image, Image, Video, Item)
    if media is None or isinstance(media, single) or hasattr(media, "read") or not isinstance(media, Iterable):
        return [media]
    if isinstance(media, dict) or hasattr(media, "keys"):
        raise MediaError("a mapping is no item; a Hugging Face processor's output goes through encoder.items(...)")
    if hasattr(media, "__array__"):
        return [media]
    return list(media)


def decode(medium: Any, index: int | None = None, sample: Sampler | None = None) -> np.ndarray | Video | Item:
    """One item of the user's input as RGB uint8 [height, width, 3]; a Video with such frames; an Item as it is.

    The array may be the caller's own memory: read it, do not keep it.

    Args:
        index: the item's place, for the error.
        sample: how a video file is sampled; None takes ``uniform``.

    Raises:
        MediaError: the item cannot be used. The message names its place, what it is and the remedy.
        DependencyError: a video file without the extra ``video``.
    """
    try:
        if isinstance(medium, Item):
            return medium
        return _clip(medium, sample or uniform) if isinstance(medium, Video) else picture(medium)
    except MediaError as error:
        if index is None:
            raise
        raise error.at(index) from error.__cause__


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
        return _from_array(medium, "array")
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
        raise MediaError(f"{_kind(medium)}: declare its layout, jaxvit.Image(array, layout='hwc') or 'chw'")
    raise MediaError(
        f"{_kind(medium)} is no picture: pass a path, bytes, a binary file, a PIL image, a uint8 array [h, w, 3], "
        "jaxvit.Image or jaxvit.Video"
    )


# Pictures ------------------------------------------------------------------------------------------------------------


def _kind(medium: Any) -> str:
    return f"{type(medium).__module__}.{type(medium).__qualname__}"


def _lock(medium: Any) -> threading.Lock:
    return _LOCKS[(id(medium) >> 5) % len(_LOCKS)]


def _from_path(path: str | bytes) -> np.ndarray:
    path = os.fsdecode(path)
    if path.startswith(("http://", "https://", "data:")):
        raise MediaError(f"{path[:60]!r} is a URL, and nothing is fetched: pass the bytes of the file")
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(f"path {path!r} cannot be read ({reason}): check the path") from error
    return _from_bytes(data, f"path {path!r}")


def _from_file(file: Any) -> np.ndarray:
    with _lock(file):
        try:
            if hasattr(file, "seekable") and file.seekable():
                position = file.tell()
                file.seek(0)
                data = file.read()
                file.seek(position)
            else:
                data = file.read()
        except Exception as error:
            raise MediaError(f"{_kind(file)} cannot be read ({error}): pass an open binary file") from error
    if not isinstance(data, (bytes, bytearray)):
        raise MediaError(f"{_kind(file)} gives {type(data).__name__}, not bytes: open the file with 'rb'")
    return _from_bytes(bytes(data), f"file {str(getattr(file, 'name', type(file).__name__))!r}")


def _from_bytes(data: bytes, what: str) -> np.ndarray:
    if not data:
        raise MediaError(f"{what}: 0 bytes, so no image: pass a whole image file")
    if data.startswith(b"version https://git-lfs"):
        raise MediaError(f"{what}: a Git LFS pointer and not the image: fetch it with git lfs pull")
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
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise _too_large(what, f"{height} x {width} pixels, the limit is {limit}")
    if not width or not height:
        raise MediaError(f"{what}: {height} x {width} pixels, so nothing to encode: leave it out")
    try:
        image.load()
        return np.asarray(_rgb(_upright(image), what))
    except MediaError:
        raise
    except Exception as error:
        raise _broken(what, error) from error


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """The EXIF orientation applied. Pillow's own function also rewrites the EXIF block, and fails on a bad one."""
    turns = PIL.Image.Transpose
    methods = {2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE}
    methods |= {6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90}
    try:
        method = methods.get(image.getexif().get(0x0112))
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
    if image.layout not in ("hwc", "chw"):
        raise MediaError(f"Image: layout is {image.layout!r}: declare 'hwc' or 'chw'")
    what = f"Image of layout {image.layout}"
    try:
        array = np.asarray(image.array)
    except Exception as error:
        raise MediaError(f"{what}: {_kind(image.array)} is no array in host memory ({error}): copy it there") from error
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
    if array.shape[2] == 1:
        return np.broadcast_to(array, (*array.shape[:2], 3))
    if array.shape[2] == 4:
        return np.asarray(_rgb(PIL.Image.fromarray(np.ascontiguousarray(array)), what))
    return array


def _too_large(what: str, detail: str) -> MediaError:
    return MediaError(
        f"{what}: {detail}: shrink it first, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust where it comes from"
    )


def _broken(what: str, error: Exception) -> MediaError:
    return MediaError(f"{what}: cut off or damaged ({type(error).__name__}: {error}): pass a whole image file")


# Videos --------------------------------------------------------------------------------------------------------------


def _clip(video: Video, sample: Sampler) -> Video:
    what = "Video" if video.path is None else f"video {video.path!r}"
    _check_rate(what, "fps", video.fps)
    if isinstance(video.prune, bool) or not isinstance(video.prune, (int, float)) or not 0 <= video.prune < 1:
        raise MediaError(f"{what}: prune is {video.prune!r}: give the share of tokens to drop, from 0 to less than 1")
    if video.path is not None:
        return _sampled(video, what, sample)
    if isinstance(video.frames, (str, bytes, os.PathLike)):
        raise MediaError(f"{what}: {video.frames!r} is no list of frames: a file goes in as jaxvit.Video.open(path)")
    try:
        given = list(video.frames)
    except TypeError as error:
        raise MediaError(f"{what}: {_kind(video.frames)} is no sequence of frames: pass a list of pictures") from error
    if not given:
        raise MediaError(f"{what}: no frames: pass at least one, or leave the video out")
    frames = []
    for place, frame in enumerate(given):
        try:
            frames.append(picture(frame))
        except MediaError as error:
            raise MediaError(f"{what}, frame {place}: {error}") from error.__cause__
        if frames[-1].shape != frames[0].shape:
            sizes = [f"{array.shape[0]} x {array.shape[1]}" for array in (frames[0], frames[-1])]
            raise MediaError(f"{what}: frame 0 is {sizes[0]}, frame {place} is {sizes[1]}: make all frames one size")
    times = _timestamps(video.timestamps, len(frames), what)
    return Video(tuple(frames), fps=video.fps, timestamps=times, prune=float(video.prune))


def _timestamps(given: Any, frames: int, what: str) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        times = tuple(float(time) for time in given)
    except (TypeError, ValueError) as error:
        raise MediaError(f"{what}: timestamps are not numbers ({error}): give seconds, one a frame") from error
    if len(times) != frames:
        raise MediaError(f"{what}: {frames} frames and {len(times)} timestamps: give one a frame, in seconds")
    if not all(map(math.isfinite, times)) or any(late < early for early, late in itertools.pairwise(times)):
        raise MediaError(f"{what}: timestamps fall or are not finite: give seconds in the order of the frames")
    return times


def _check_rate(what: str, name: str, rate: Any) -> None:
    if rate is None:
        return
    number = isinstance(rate, (int, float, np.number)) and not isinstance(rate, bool)
    if not number or not math.isfinite(rate) or rate <= 0:
        raise MediaError(f"{what}: {name} is {rate!r}: give frames a second, more than 0, or leave it out")


def _sampled(video: Video, what: str, sample: Sampler) -> Video:
    try:
        import av
    except ImportError as error:
        raise DependencyError("reading video files needs PyAV: pip install 'jaxvit[video]'") from error
    try:
        with av.open(video.path) as container:
            if not container.streams.video:
                raise MediaError(f"{what}: no video in this file: pass another, or its pictures one by one")
            stream = container.streams.video[0]
            native = float(stream.average_rate or stream.guessed_rate or 0)
            total = stream.frames or sum(1 for _ in container.decode(stream))  # some containers do not say
            if not native or not total:
                raise MediaError(f"{what}: {total} frames at {native} a second: decode it and pass the frames")
            wanted = set(sample(total, native, video.fps))
            container.seek(0)
            frames, indices = [], []
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    # Phones store the turn beside the frames, counterclockwise in degrees.
                    array = frame.to_ndarray(format="rgb24")
                    frames.append(np.rot90(array, round(getattr(frame, "rotation", 0) / 90) % 4))
                    indices.append(index)
                if len(indices) == len(wanted):
                    break
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(
            f"{what} cannot be read ({type(error).__name__}: {error}): check the path, or pass decoded frames"
        ) from error
    if not frames:
        raise MediaError(f"{what}: not one frame could be decoded: pass a whole file")
    times = tuple(index / native for index in indices)
    return Video(tuple(frames), fps=len(indices) / total * native, timestamps=times, prune=float(video.prune))
