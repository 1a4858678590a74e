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
  rounded; of 16-bit colours Pillow reads the upper bytes. 32-bit integers and floats have no known range and are
  refused.
- A picture over Pillow's limit (``PIL.Image.MAX_IMAGE_PIXELS``, half of where Pillow itself gives up) is refused before
  it is decoded. The limit is only read here, never set.
- An array over that limit is refused too; so is a path of a pipe, a device or a socket, which might never end, and a
  file over 1 GiB.
- Cut-off, empty and foreign files are refused; so are EPS, which would have to be run, and URLs: nothing is fetched.
  (Under ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``, which is not set here, Pillow gives what there is of a cut-off file.)

**Videos.** ``jaxvit.Video(frames)`` takes its frames as they are, never resampled; each is a picture as above, all of
one size. ``fps`` and ``timestamps`` (seconds, one a frame) only fill ``Item.layout``. ``Video.open(path, fps=...)``
samples a file as the model family's reference does (``fps=None``: at the checkpoint's rate, 2 a second where it names
none), and turns its frames as the file says; it needs the extra ``video``. ``prune`` is Qwen2.5-VL's.

A refused item raises MediaError, which names its place, what it is and what to do. The caller's arrays are only read.
"""

from __future__ import annotations

import itertools
import math
import numbers
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from jaxvit.errors import DependencyError, JaxvitError, MediaError
from jaxvit.models.family import Family, Item
from jaxvit.models.pixels import HUGE, uniform
from jaxvit.pictures import Image, kind_of, no_file, picture


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

    def __init__(
        self, frames: Any, *, fps: float | int | None = None, timestamps: Any = None, prune: float | int = 0.0
    ):
        # Iterators are read once, so that a clip can be encoded twice.
        frames, timestamps = (list(one) if isinstance(one, Iterator) else one for one in (frames, timestamps))
        self._set(frames, fps, timestamps, prune, None)

    def _set(self, *values: Any) -> None:
        for name, value in zip(("frames", "fps", "timestamps", "prune", "path"), values, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, fps: float | int | None = None, prune: float | int = 0.0) -> Video:
        """A video file, read when it is encoded (extra ``video``).

        Args:
            fps: frames a second to take; None takes the model family's own rate.
        """
        video = cls.__new__(cls)
        video._set((), fps, None, prune, os.fspath(path))
        return video


def as_sequence(media: Any) -> list[Any]:
    """The items of a call: those of a list, tuple or other iterable, or the one item that was passed."""
    return list(as_iterable(media))


def as_iterable(media: Any) -> Iterable[Any]:
    """The same without reading it: a stream may have no end."""
    single = (str, bytes, bytearray, memoryview, os.PathLike, np.ndarray, PIL.Image.Image, Image, Video, Item)
    if media is None or isinstance(media, single) or hasattr(media, "read") or not isinstance(media, Iterable):
        return [media]
    if isinstance(media, dict) or hasattr(media, "keys"):
        raise MediaError("a mapping is no item; a Hugging Face processor's output goes through encoder.items(...)")
    if hasattr(media, "__array__"):
        return [media]
    return media


def decode(medium: Any, index: int | None = None, family: Family | None = None) -> np.ndarray | Video | Item:
    """One item of the user's input as RGB uint8 [height, width, 3]; a Video with such frames; an Item as it is.

    The array may be the caller's own memory: read it, do not keep it.

    Args:
        index: the item's place, for the error.
        family: says which frames of a video file are taken, and refuses videos, unread, where it takes none; without
            one, files are sampled uniformly.

    Raises:
        MediaError: the item cannot be used. The message names its place, what it is and the remedy.
        DependencyError: a video file without the extra ``video``.
    """
    try:
        if isinstance(medium, Item):
            return medium
        return _clip(medium, family) if isinstance(medium, Video) else picture(medium)
    except MediaError as error:
        if index is None:
            raise
        raise error.at(index) from error.__cause__
    except JaxvitError:
        raise
    except Exception as error:  # a caller's object may raise anything, wherever it is touched
        refused = MediaError(
            f"{kind_of(medium)} cannot be read ({type(error).__name__}: {error}): pass its decoded pixels as an array"
        )
        raise (refused if index is None else refused.at(index)) from error


def _clip(video: Video, family: Family | None) -> Video:
    if family is not None and not family.takes_video:
        raise family.no_video()
    what = "Video" if video.path is None else f"video {video.path!r}"
    fps = _rate(what, video.fps)
    if not _real(video.prune) or not 0 <= video.prune < 1:
        raise MediaError(f"{what}: prune is {video.prune!r}: give the share of tokens to drop, from 0 to less than 1")
    if video.path is not None:
        return _sampled(video.path, fps, float(video.prune), what, family)
    if isinstance(video.frames, (str, bytes, os.PathLike)):
        raise MediaError(f"{what}: {video.frames!r} is no list of frames: a file goes in as jaxvit.Video.open(path)")
    if getattr(video.frames, "ndim", None) == 3 and video.frames.shape[2] in (3, 4):
        raise MediaError(
            f"{what}: an array {list(video.frames.shape)} is one picture: pass a list of such, or an array "
            "[frames, height, width, 3]"
        )
    try:
        given = list(video.frames)
    except TypeError as error:
        raise MediaError(
            f"{what}: {kind_of(video.frames)} is no sequence of frames: pass a list of pictures"
        ) from error
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
    return Video(tuple(frames), fps=fps, timestamps=times, prune=float(video.prune))


def _timestamps(given: Any, frames: int, what: str) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        times = tuple(float(time) for time in given)
    except (TypeError, ValueError, OverflowError) as error:
        raise MediaError(f"{what}: timestamps are not numbers ({error}): give seconds, one a frame") from error
    if len(times) != frames:
        raise MediaError(f"{what}: {frames} frames and {len(times)} timestamps: give one a frame, in seconds")
    if not all(map(math.isfinite, times)) or any(late < early for early, late in itertools.pairwise(times)):
        raise MediaError(f"{what}: timestamps fall or are not finite: give seconds in the order of the frames")
    return times


def _rate(what: str, fps: Any) -> float | None:
    if fps is None:
        return None
    if not _real(fps) or not 1 / HUGE < fps < HUGE:
        raise MediaError(f"{what}: fps is {fps!r}: give frames a second, more than 0, or leave it out")
    return float(fps)


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _sampled(path: str, fps: float | None, prune: float, what: str, family: Family | None) -> Video:
    try:
        import av
    except ImportError as error:
        raise DependencyError("reading video files needs PyAV: pip install 'jaxvit[video]'") from error
    if fault := no_file(path):
        raise MediaError(f"{what} cannot be read ({fault}): check the path, or pass decoded frames")
    frames, indices = [], []
    try:
        with av.open(path, "r") as container:
            if not container.streams.video:
                raise MediaError(f"{what}: no video in this file: pass another, or its pictures one by one")
            stream = container.streams.video[0]
            native = float(stream.average_rate or stream.guessed_rate or 0)
            total = stream.frames
        if not total:  # some containers do not say
            with av.open(path, "r") as container:
                total = sum(1 for _ in container.decode(video=0))
        if not native or not total:
            raise MediaError(f"{what}: {total} frames at {native} a second: decode it and pass the frames")
        wanted = set((family.sample_frames if family else uniform)(total, native, fps))
        with av.open(path, "r") as container:
            for index, frame in enumerate(itertools.islice(container.decode(video=0), max(wanted) + 1)):
                if index in wanted:
                    # Phones store the turn beside the frames, counterclockwise in degrees.
                    turns = round(getattr(frame, "rotation", 0) / 90) % 4
                    frames.append(np.rot90(frame.to_ndarray(format="rgb24"), turns))
                    indices.append(index)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(
            f"{what} cannot be read ({type(error).__name__}: {error}): check the path, or pass decoded frames"
        ) from error
    if not frames:
        raise MediaError(f"{what}: not one frame could be decoded: pass a whole file")
    times = tuple(index / native for index in indices)
    return Video(tuple(frames), fps=len(indices) / total * native, timestamps=times, prune=prune)
