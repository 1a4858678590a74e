"""Failures that people met with encoders of this kind, end to end. README.md says which test asserts which case."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import jaxvit
from jaxvit import tiny
from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models.family import Item, Piece
from jaxvit.models.qwen2_5_vl.layout import windows
from tests.families import BUDGETS, FAMILIES, VIDEO, checkpoint, clip, encoder, media, picture, relative

KIMI, QWEN = "kimi_k25", "qwen2_5_vl"


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def load(name: str, **options: Any) -> jaxvit.Encoder:
    return jaxvit.load(checkpoint(name), **{"dtype": "float32", "budgets": BUDGETS, "store": False, **options})


def sharing(other: jaxvit.Encoder, shared: jaxvit.Encoder) -> jaxvit.Encoder:
    """An encoder of the same tower and buckets, with the executables of another."""
    other.dispatcher._ready, other.dispatcher._exact = shared.dispatcher._ready, shared.dispatcher._exact
    return other


def values(shared: jaxvit.Encoder, item: Item) -> np.ndarray:
    """The normalised pixels of an item's first piece, as the tower gets them: float32 [rows, values]."""
    patches = item.pieces[0].patches
    return shared.family.table[patches, np.resize(shared.family.channels, patches.shape[1])]


# Images ---------------------------------------------------------------------------------------------------------------


def encoded(image: PIL.Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def gradient(height: int = 60, width: int = 84) -> np.ndarray:
    """Smooth, and without any symmetry."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) * 80 // width], axis=-1).astype(np.uint8)


def sixteen_bit_rgb() -> bytes:
    """A PNG of 16 bits a channel, which Pillow reads and does not write; the upper bytes are the gradient."""
    pixels = (gradient().astype(">u2") << 8) + 77

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 84, 60, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2"))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def on_white(rgba: np.ndarray) -> np.ndarray:
    wide, alpha = rgba[..., :3].astype(np.float64), rgba[..., 3:] / 255
    return np.rint(wide * alpha + 255 * (1 - alpha)).astype(np.uint8)


def scraped(folder: Path) -> dict[str, tuple[Any, np.ndarray]]:
    """What a folder of scraped images holds, in every form that can be passed, and the RGB pixels of each."""
    rgb = gradient()
    image = PIL.Image.fromarray(rgb)
    png = encoded(image)
    path = folder / "picture.png"
    path.write_bytes(png)
    (folder / "unicode é.png").write_bytes(png)
    gray = rgb[..., 1]
    clear = np.dstack([rgb, np.where(np.arange(84) < 42, 0, 255)[None].repeat(60, 0).astype(np.uint8)])
    indexed = image.convert("P", palette=PIL.Image.Palette.ADAPTIVE, colors=16)
    palette = np.asarray(indexed.getpalette(), np.uint8).reshape(-1, 3)
    places = np.asarray(indexed)
    holed = np.where((places == 3)[..., None], 255, palette[places]).astype(np.uint8)
    opened = {kind: PIL.Image.open(io.BytesIO(encoded(image, "JPEG"))) for kind in ("lazy", "loaded")}
    opened["loaded"].load()
    jpeg = np.asarray(PIL.Image.open(io.BytesIO(encoded(image, "JPEG"))))
    cmyk = encoded(image.convert("CMYK"), "JPEG")
    frames = [PIL.Image.new("RGB", (84, 60), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    red = np.full((60, 84, 3), (255, 0, 0), np.uint8)
    many = {"save_all": True, "append_images": frames[1:]}
    found: dict[str, tuple[Any, np.ndarray]] = {
        "path": (path, rgb),
        "path of letters": (str(folder / "unicode é.png"), rgb),
        "bytes": (png, rgb),
        "bytearray": (bytearray(png), rgb),
        "memoryview": (memoryview(png), rgb),
        "file object": (io.BytesIO(png), rgb),
        "PIL": (image, rgb),
        "PIL, lazy": (opened["lazy"], jpeg),
        "PIL, loaded": (opened["loaded"], jpeg),
        "array": (rgb, rgb),
        "array, not contiguous": (np.asfortranarray(rgb)[:, ::-1], rgb[:, ::-1]),
        "array, chw": (jaxvit.Image(rgb.transpose(2, 0, 1), layout="chw"), rgb),
        "array, gray": (gray, np.repeat(gray[..., None], 3, 2)),
        "array, rgba": (clear, on_white(clear)),
        "1 x 1": (encoded(PIL.Image.new("RGB", (1, 1), (9, 200, 31))), np.full((1, 1, 3), (9, 200, 31), np.uint8)),
        "thin": (encoded(PIL.Image.fromarray(gradient(3, 300))), gradient(3, 300)),
        "tall": (encoded(PIL.Image.fromarray(gradient(300, 2))), gradient(300, 2)),
        "L": (encoded(image.convert("L")), np.repeat(np.asarray(image.convert("L"))[..., None], 3, 2)),
        "LA": (
            encoded(PIL.Image.fromarray(np.dstack([gray, clear[..., 3]]), "LA")),
            on_white(np.dstack([gray, gray, gray, clear[..., 3]])),
        ),
        "1": (encoded(image.convert("1")), np.repeat(np.asarray(image.convert("1"))[..., None] * np.uint8(255), 3, 2)),
        "P": (encoded(indexed), palette[places]),
        "P, transparent": (encoded(indexed, transparency=3), holed),
        "RGBA": (encoded(PIL.Image.fromarray(clear)), on_white(clear)),
        "CMYK": (cmyk, np.asarray(PIL.Image.open(io.BytesIO(cmyk)).convert("RGB"))),
        "16-bit gray": (
            encoded(PIL.Image.fromarray(gray.astype(np.uint16) * 257)),
            np.repeat(gray[..., None], 3, 2),
        ),
        "16-bit RGB": (sixteen_bit_rgb(), rgb),
        "GIF": (encoded(frames[0], "GIF", **many), red),
        "WebP": (encoded(frames[0], "WEBP", lossless=True, **many), red),
        "TIFF": (encoded(frames[0], "TIFF", **many), red),
    }
    upright = {
        1: jpeg, 2: jpeg[:, ::-1], 3: jpeg[::-1, ::-1], 4: jpeg[::-1], 5: jpeg.transpose(1, 0, 2),
        6: np.rot90(jpeg, -1), 7: np.rot90(jpeg, 2).transpose(1, 0, 2), 8: np.rot90(jpeg),
    }  # fmt: skip
    for tag, expected in upright.items():
        exif = PIL.Image.Exif()
        exif[0x0112] = tag
        found[f"EXIF {tag}"] = (encoded(image, "JPEG", exif=exif), expected)
    return found


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_every_kind_of_image_of_a_scraped_folder_gives_what_its_pixels_give(name: str, tmp_path: Path):
    """In one call, so that no kind may touch another; a picture in front and one behind must keep their bits."""
    shared, kinds = encoder(name), scraped(tmp_path)
    canary = picture(56, 56)
    before = shared.encode(canary)[0]
    found = shared.encode([canary, *(medium for medium, _ in kinds.values()), canary])
    expected = shared.encode([canary, *(np.ascontiguousarray(rgb) for _, rgb in kinds.values()), canary])
    for kind, ours, theirs in zip(["canary", *kinds, "canary"], found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=kind)
        assert np.isfinite(ours).all()
    assert len({rows.tobytes() for rows in found}) > 20
    np.testing.assert_array_equal(shared.encode(canary)[0], before)


def bad_items(name: str) -> dict[str, tuple[Any, str]]:
    """What is refused, and words of the reason: every kind of ``test_media``, and what the family cannot take."""
    from tests.test_media import BAD, BAD_VIDEOS

    found: dict[str, tuple[Any, str]] = {kind: pair for kind, pair in BAD.items() if kind != "huge text chunk"}
    unread = "has no video input; pass the frames as images"
    for kind, (video, words) in BAD_VIDEOS.items():
        found[f"video, {kind}"] = (video, words if name in VIDEO else unread)
    if name == QWEN:
        found |= {"aspect": (np.zeros((1, 201, 3), np.uint8), "201.0 times the other, the limit is 200: crop it")}
    if name == KIMI:
        found |= {"prune": (jaxvit.Video([picture(56, 56)] * 2, prune=0.5), "prune is 0.5, .*: leave it out")}
    if name not in VIDEO:
        found |= {
            "aspect": (np.zeros((1, 2000, 3), np.uint8), "2000.0 times the other, .*: crop it, or cut it into parts"),
            "video": (clip(2, 64, 64), unread),
        }
    return found


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_each_bad_item_is_named_in_its_place_and_the_good_ones_keep_their_bits(name: str):
    shared, bad = encoder(name), bad_items(name)
    good = [picture(56, 56), picture(64, 90, 1), picture(70, 70, 2)]
    expected = list(shared.encode(good))
    call: list[Any] = [good[0], *(medium for medium, _ in bad.values()), good[1]]
    call.insert(20, good[2])
    calls = sum(bucket["calls"] for bucket in shared.stats()["buckets"].values())

    with pytest.raises(MediaError) as caught:
        shared.encode(call)
    assert sum(bucket["calls"] for bucket in shared.stats()["buckets"].values()) == calls, "nothing ran"
    places = [index for index in range(1, len(call) - 1) if index != 20]
    assert sorted(caught.value.errors) == places
    assert caught.value.index == 1

    found = shared.encode(call, on_error="return")
    for index, (kind, (_, words)) in zip(places, bad.items(), strict=True):
        assert isinstance(found[index], MediaError), kind
        assert found[index].index == index
        assert str(found[index]).startswith(f"item {index}: "), kind
        assert str(found[index]) in str(caught.value)
        with pytest.raises(MediaError, match=words):
            raise found[index]
    # The same pictures in the order of this call: the third stands second.
    again = list(shared.encode([good[0], good[2], good[1]]))
    for index, theirs in zip((0, 20, len(call) - 1), again, strict=True):
        np.testing.assert_array_equal(found[index], theirs)
    for ours, theirs in zip(shared.encode(good), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


SMALLEST = {QWEN: ((1, 4, 4), 4), KIMI: ((1, 2, 2), 1), "lfm2_vl": ((1, 16, 16), 64), "lfm2_5_vl": ((1, 16, 16), 64)}


def test_i1_one_pixel_is_an_image_and_its_neighbours_do_not_feel_it(name: str):
    shared, pixel = encoder(name), PIL.Image.new("RGB", (1, 1), (200, 30, 90))
    [item] = shared.prepare(pixel)
    assert (item.grids, item.tokens) == ((SMALLEST[name][0],), SMALLEST[name][1])
    assert np.isfinite(shared.encode(item)[0]).all()
    pair = [picture(168, 224, 1), picture(168, 224, 2)]
    first, middle, last = shared.encode([pair[0], pixel, pair[1]])
    for ours, theirs in zip([first, last], shared.encode(pair), strict=True):
        assert relative(ours, theirs) <= 1e-5
    assert relative(middle, shared.encode(pixel)[0]) <= 1e-5


@pytest.mark.parametrize(("size", "tokens"), [((26, 28), 6), ((27, 332), 12), ((17, 134), 5), ((14, 14), 4)], ids=str)
def test_i2_a_side_below_28_pixels_is_enlarged(size: tuple[int, int], tokens: int):
    for other in FAMILIES:
        rows = encoder(other).encode([picture(56, 56), picture(*size)])[1]
        assert np.isfinite(rows).all()
        if other == QWEN:
            assert len(rows) == tokens


@pytest.mark.reference
def test_i4_one_picture_in_any_layout_has_one_grid_and_the_same_pixels(name: str):
    import torch

    rgb = picture(480, 640)
    chw = np.ascontiguousarray(rgb.transpose(2, 0, 1))
    forms = [rgb, PIL.Image.fromarray(rgb), jaxvit.Image(chw, "chw"), jaxvit.Image(torch.from_numpy(chw), "chw")]
    items = encoder(name).prepare(forms)
    for item in items:
        assert item.grids == items[0].grids
        np.testing.assert_array_equal(item.patches, items[0].patches)
    if name == QWEN:
        assert items[0].grids == ((1, 34, 46),)


def test_i5_and_i6_black_and_transparent_pictures_have_the_known_values(name: str):
    shared = encoder(name)
    low, high = ((-1.7923, -1.4802), (1.9303, 2.1460)) if name == QWEN else ((-1.0, -1.0), (1.0, 1.0))
    black = [PIL.Image.new("L", (56, 56), 0), np.zeros((56, 56), np.uint8), PIL.Image.new("1", (56, 56), 0)]
    clear = [
        PIL.Image.new("RGBA", (56, 56), (0, 0, 0, 0)),
        PIL.Image.new("RGBA", (56, 56), (255, 255, 255, 0)),
        PIL.Image.new("LA", (56, 56), (0, 0)),
        encoded(PIL.Image.new("P", (56, 56), 0), transparency=0),
    ]
    for kinds, (least, most) in ((black, low), (clear, high)):
        for item in shared.prepare(kinds):
            found = values(shared, item)
            assert found.min() == pytest.approx(least, abs=1e-3)
            assert found.max() == pytest.approx(most, abs=1e-3)


def test_i8_an_empty_call_a_none_and_damage_leave_the_encoder_as_it_was(name: str):
    shared, good = encoder(name), picture(70, 90)
    before = shared.encode(good)[0]
    assert list(shared.encode([])) == []
    cut = encoded(PIL.Image.fromarray(picture(200, 200)), "JPEG")
    for call, index in (([good, None], 1), ([cut[: len(cut) * 6 // 10]], 0), (None, 0)):
        with pytest.raises(MediaError) as caught:
            shared.encode(call)
        assert caught.value.index == index
        np.testing.assert_array_equal(shared.encode(good)[0], before)


# Processing -----------------------------------------------------------------------------------------------------------

OVERRIDES: dict[str, tuple[str, int, str]] = {
    QWEN: ("max_pixels", 50_000, "min_pixels"),
    KIMI: ("max_patches", 64, ""),
    "lfm2_vl": ("max_image_tokens", 80, "min_image_tokens"),
    "lfm2_5_vl": ("max_image_tokens", 80, "min_image_tokens"),
}


def test_p3_a_setting_of_the_keyword_beats_the_file_and_contradictions_are_refused(name: str):
    setting, value, opposite = OVERRIDES[name]
    large = picture(350, 400)
    plain = encoder(name).prepare(large)[0].tokens
    changed = load(name, processor={setting: value})
    assert changed.prepare(large)[0].tokens < plain
    assert changed.overrides == {setting: value}
    for wrong in ({setting: 0}, {setting: "many"}, {"no_such_setting": 1}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            load(name, processor=wrong)
    if opposite:
        with pytest.raises(CheckpointError, match=rf"{opposite} .* is more than {setting}"):
            load(name, processor={setting: value, opposite: 10**6})


def test_p5_each_of_mixed_sizes_gets_its_own_tokens_in_any_order(name: str):
    """Tiled pictures and duplicates among them."""
    shared = encoder(name)
    sizes = [(64, 64), (200, 260), (64, 64), (700, 800) if name not in VIDEO else (270, 330)]
    pictures = [picture(*size, seed) for size, seed in zip(sizes, (1, 2, 1, 3), strict=True)]
    tokens = [shared.prepare(one)[0].tokens for one in pictures]
    alone = [shared.encode(one)[0] for one in pictures]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        found = shared.encode([pictures[index] for index in order])
        assert [len(rows) for rows in found] == [tokens[index] for index in order]
        assert all(relative(rows, alone[index]) <= 1e-5 for rows, index in zip(found, order, strict=True))


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(140, 140), (112, 112), (224, 224), (84, 84), (1092, 1932)], ids=str)
@pytest.mark.reference
def test_n6_windows_are_those_of_the_reference_and_none_is_empty(size: tuple[int, int]):
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

    rows, columns = size[0] // 14, size[1] // 14
    if hasattr(Tower, "get_window_index"):
        holder = Tower.__new__(Tower)
        for attribute, value in (
            ("window_size", 112), ("spatial_merge_size", 2), ("patch_size", 14), ("spatial_merge_unit", 4),
        ):  # fmt: skip
            object.__setattr__(holder, attribute, value)
        order, ends = Tower.get_window_index(holder, torch.tensor([[1, rows, columns]]))
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index

        order, ends = get_vision_window_index(torch.tensor([[1, rows, columns]]), 2, 112, 14)
    lengths = np.diff(np.asarray(ends))
    ours = windows(rows, columns, 2, 4)
    np.testing.assert_array_equal(ours.order, np.asarray(order))
    assert ours.lengths.tolist() == [length for length in lengths.tolist() if length]
    assert ours.lengths.min() > 0
    if size == (140, 140):
        assert ours.lengths.tolist() == [64, 16, 16, 4]


def forced(name: str, dtype: str, pieces: list[Piece], budget: int) -> np.ndarray:
    """The first piece's rows from one call of that bucket."""
    dispatcher = encoder(name, dtype).dispatcher
    bucket = next(bucket for bucket in dispatcher.ladder if bucket.tokens == budget)
    executable = dispatcher.executable(bucket)
    rows, finite = executable(dispatcher.weights[0], executable.program.fill(pieces))
    assert np.asarray(finite)[: pieces[0].tokens].all()
    return np.asarray(rows)[: pieces[0].tokens]


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_n7_a_bucket_repeats_its_bits_and_buckets_differ_within_the_stated_tolerance(name: str, dtype: str):
    from jaxvit.reference import load_reference

    shared = encoder(name, dtype)
    first, *others = [shared.prepare(picture(64, 64, seed))[0].pieces[0] for seed in range(4)]
    found = {}
    for budget in BUDGETS:
        fits = [first, *others][: max(1, budget // first.tokens)]
        calls = [[first], fits, [first] * len(fits)]
        found[budget] = forced(name, dtype, [first], budget)
        for repeat in range(20):
            again = forced(name, dtype, calls[repeat % 3], budget)
            assert again.tobytes() == found[budget].tobytes()
    apart = relative(*(rows.astype(np.float64) for rows in found.values()))
    bound = 1e-5
    if dtype == "bfloat16":
        item = Item((first,), (first.grid,), first.tokens)
        theirs = [load_reference(checkpoint(name), dtype=one).encode(item) for one in ("bfloat16", "float32")]
        bound = 1.5 * relative(*theirs)
    assert apart <= bound


# Buckets --------------------------------------------------------------------------------------------------------------


def test_b1_a_hundred_images_of_one_token_go_through_a_budget_of_64():
    small = load(KIMI, budgets=[64])
    sharing(small, encoder(KIMI))
    found = small.encode([picture(28, 28, seed) for seed in range(100)])
    assert [len(rows) for rows in found] == [1] * 100
    assert [len(call.slots) for call in found.plan.calls] == [64, 36]
    alone = small.encode(picture(28, 28, 70))[0]
    assert relative(found[70], alone) <= 1e-5


def test_b2_a_small_picture_keeps_its_bits_around_large_ones(name: str):
    shared, canary, large = encoder(name), picture(56, 56), picture(300, 330, 1)
    before = shared.encode(canary)[0]
    for other in (large, [large, canary], clip(3, 168, 168) if name in VIDEO else [large] * 3, canary):
        shared.encode(other)[0]
        np.testing.assert_array_equal(shared.encode(canary)[0], before)


@pytest.mark.parametrize("name", VIDEO)
def test_b2_equal_totals_with_other_boundaries_are_other_results(name: str):
    shared = encoder(name)
    squares, strip = [picture(112, 112, 1), picture(112, 112, 2)], [picture(112, 224, 3)]
    assert sum(item.tokens for item in shared.prepare(squares)) == shared.prepare(strip)[0].tokens
    expected = [list(shared.encode(call)) for call in (squares, strip)]
    for _ in range(3):
        for call, rows in zip((squares, strip), expected, strict=True):
            for ours, theirs in zip(shared.encode(call), rows, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_b3_the_same_array_twice_and_written_over_at_once(name: str):
    shared, array = encoder(name), picture(84, 84)
    expected = [rows.copy() for rows in shared.encode([array.copy(), array.copy()])]
    found = shared.encode([array, array])
    array[...] = 0
    shared.encode([array, array])[1]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found[0][...] = 7
    np.testing.assert_array_equal(found[1], expected[1])


def test_b7_many_pictures_are_split_into_calls_of_bounded_size(name: str):
    shared = encoder(name)
    [item] = shared.prepare(picture(168, 168))
    plan = shared.plan([item] * 500)
    assert sorted(slot.item for call in plan.calls for slot in call.slots) == list(range(500))
    assert max(call.bucket.tokens for call in plan.calls) == max(BUDGETS)
    assert sum(call.patches for call in plan.calls) == 500 * item.num_patches


@pytest.mark.slow
def test_b7_a_page_of_55100_patches_runs_in_memory_linear_in_its_patches():
    """The tall page of I3. Dense scores of 4 heads would take 48 GB."""
    page = load(QWEN, budgets=[64])
    before = peak_memory()
    rows = page.encode(picture(15420, 690))[0]
    assert rows.shape == (13775, 96)
    assert np.isfinite(rows).all()
    [executable] = page.dispatcher._ready.values()
    memory = {part: round(size / 2**20) for part, size in executable.memory().items()}
    print(
        f"55,100 patches: {memory} MiB of the executable, peak of the process {(peak_memory() - before) >> 20} MiB more"
    )
    assert executable.memory()["temporaries"] < 4 * 2**30


def peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Checkpoints ----------------------------------------------------------------------------------------------------------


def lfs_pointer(folder: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 901692416\n"
    shard(folder).write_bytes(pointer)


def shard(folder: Path) -> Path:
    """The last file with weights: in every tiny checkpoint it holds vision tensors."""
    return sorted(folder.glob("*.safetensors"))[-1]


def pickled(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(S'false'\ntR.")


def adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def changed_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def heads_of(config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    key = next(key for key in ("num_heads", "vt_num_attention_heads", "num_attention_heads") if key in vision)
    vision[key] = 17


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "LFS pointer": (lfs_pointer, "safetensors is a Git LFS pointer|safetensors.*Git LFS pointer"),
    "one byte short": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-1]), r"safetensors.*(?:cut off|bytes)"),
    "absurd header": (lambda f: shard(f).write_bytes(struct.pack("<Q", 2**63) + b"{}"), "9223372036854775808"),
    "missing shard": (lambda f: shard(f).unlink(), "model.*safetensors|has no weights"),
    "pickle": (pickled, "only pickled weights"),
    "adapter": (adapter, "holds only an adapter"),
    "corrupt JSON": (lambda f: (f / "config.json").write_text('{"a": \n'), r"config.json.*line 2"),
    "text model": (lambda f: changed_config(f, lambda c: c.pop("vision_config")), "no vision_config.*text-only"),
    "17 heads": (lambda f: changed_config(f, heads_of), r"num.*heads.* \(17\) does not divide hidden_size \(64\)"),
    "another model": (lambda f: changed_config(f, lambda c: c.update(model_type="kimi_k3")), "kimi_k3.*RMSNorm"),
    "no model type": (lambda f: changed_config(f, lambda c: c.pop("model_type")), "model_type None is not supported"),
    "deeper": (
        lambda f: changed_config(
            f, lambda c: [c["vision_config"].update({k: 9}) for k in list(c["vision_config"]) if k in DEPTHS]
        ),
        "missing",
    ),
}
DEPTHS = ("depth", "vt_num_hidden_layers", "num_hidden_layers")


@pytest.mark.parametrize("kind", BROKEN)
def test_w_a_broken_checkpoint_is_refused_with_its_cause_before_anything_is_compiled(
    name: str, kind: str, tmp_path: Path, compilations
):
    folder = tiny.tiny_checkpoint(name, tmp_path / "model")
    breaks, words = BROKEN[kind]
    breaks(folder)
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        jaxvit.load(folder, store=False)
    assert compilations.count == 0


def test_w_a_path_that_is_not_there_is_told_from_a_hub_id(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no folder .*absent, and it is not a hub id"):
        jaxvit.load(tmp_path / "absent", store=False)
    with pytest.raises(CheckpointError, match="nobody/nothing is no folder on this machine"):
        jaxvit.load("nobody/nothing", store=False)


def test_w_unknown_keys_in_the_config_are_kept_quiet(name: str, tmp_path: Path):
    folder = tiny.tiny_checkpoint(name, tmp_path / "model")
    strange = {"_name_or_path": "x", "torch_dtype": "bfloat16", "quantum": {"entangled": [1, 2]}}
    changed_config(folder, lambda config: (config.update(strange), config["vision_config"].update(strange)))
    found = sharing(jaxvit.load(folder, dtype="float32", budgets=BUDGETS, store=False), encoder(name))
    np.testing.assert_array_equal(found.encode(picture(56, 56))[0], encoder(name).encode(picture(56, 56))[0])


def test_w6_no_preprocessor_file_takes_the_family_s_values_with_a_warning(name: str, tmp_path: Path):
    folder = tiny.tiny_checkpoint(name, tmp_path / "model")
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"no preprocessor_config\.json"):
        found = jaxvit.load(folder, dtype="float32", budgets=BUDGETS, store=False)
    ours, theirs = found.prepare(picture(300, 400))[0], encoder(name).prepare(picture(300, 400))[0]
    assert ours.grids == theirs.grids
    if name != "lfm2_vl":  # this checkpoint names another kernel of the resize than the family's own
        np.testing.assert_array_equal(ours.patches, theirs.patches)


# Video ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIDEO)
def test_v1_and_v2_clips_of_every_length_have_their_tokens_and_a_bad_clip_harms_nobody(name: str):
    shared = encoder(name)
    per_frame = shared.prepare(picture(112, 112))[0].tokens
    lengths = [1, 2, 3, 4, 5, 8, 9, 17]
    chunk = 2 if name == QWEN else 4
    clips = [clip(length, 112, 112, length) for length in lengths]
    unequal = jaxvit.Video([picture(112, 112), picture(112, 84)])
    call = [*clips[:4], unequal, jaxvit.Video([]), jaxvit.Video([picture(56, 56)], fps=0), *clips[4:]]
    found = shared.encode(call, on_error="return")
    for length, rows in zip(lengths, [*found[:4], *found[7:]], strict=True):
        assert len(rows) == -(-length // chunk) * per_frame
        assert np.isfinite(rows).all()
    assert [isinstance(each, MediaError) for each in found[4:7]] == [True] * 3
    assert "frame 0 is 112 x 112, frame 1 is 112 x 84" in str(found[4])
    assert all(relative(rows, shared.encode(one)[0]) <= 1e-5 for one, rows in zip(clips, found[:4], strict=False))


def test_v1_other_temporal_patch_sizes_of_qwen_are_refused_by_name(tmp_path: Path):
    folder = tiny.tiny_checkpoint(QWEN, tmp_path / "model")
    changed_config(folder, lambda config: config["vision_config"].update(temporal_patch_size=4))
    with pytest.raises(CheckpointError, match="temporal_patch_size is 4, and only 2 is implemented"):
        jaxvit.load(folder, store=False)


@pytest.mark.parametrize("name", VIDEO)
def test_v3_frames_are_never_dropped_for_their_rate(name: str):
    shared, frames = encoder(name), clip(30, 56, 56).frames
    tokens = [shared.prepare(jaxvit.Video(frames, fps=fps))[0].tokens for fps in (30, None, 0.5)]
    assert len(set(tokens)) == 1
    stamps = [number / 30 for number in range(29)]
    with pytest.raises(MediaError, match="item 0: Video: 30 frames and 29 timestamps"):
        shared.prepare(jaxvit.Video(frames, timestamps=stamps))


@pytest.mark.parametrize("name", VIDEO)
def test_v_a_file_gives_what_its_sampled_frames_give(name: str, tmp_path: Path):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mkv"
    frames = [picture(64, 96, seed) for seed in range(12)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=6)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    shared = encoder(name)
    chosen = shared.family.sample_frames(12, 6.0, 2.0)
    assert 1 < len(chosen) < 12
    expected = shared.encode(jaxvit.Video([frames[index] for index in chosen]))[0]
    np.testing.assert_array_equal(shared.encode(jaxvit.Video.open(path, fps=2.0))[0], expected)
    bad = tmp_path / "cut.mkv"
    bad.write_bytes(path.read_bytes()[:100])
    call = [jaxvit.Video.open(bad), jaxvit.Video.open(path, fps=2.0), jaxvit.Video.open(tmp_path / "absent.mp4")]
    found = shared.encode(call, on_error="return")
    assert [isinstance(each, MediaError) for each in found] == [True, False, True]
    np.testing.assert_array_equal(found[1], expected)


# Serving --------------------------------------------------------------------------------------------------------------


def test_s1_equal_bytes_in_other_shapes_palettes_and_settings_are_other_pictures(name: str):
    shared = encoder(name)
    data = np.random.default_rng(0).integers(0, 256, 30 * 150 * 3, np.uint8).tobytes()
    wide, tall = (np.frombuffer(data, np.uint8).reshape(*shape, 3) for shape in ((30, 150), (150, 30)))
    painted = []
    for seed in (1, 2):
        image = PIL.Image.fromarray(np.random.default_rng(3).integers(0, 4, (60, 60), np.uint8), "L").convert("P")
        image.putpalette(np.random.default_rng(seed).integers(0, 256, 12, np.uint8).tobytes())
        painted.append(image)
    assert painted[0].tobytes() == painted[1].tobytes()
    rgba = np.zeros((60, 60, 4), np.uint8)
    half = np.dstack([rgba[..., :3], np.full((60, 60, 1), 128, np.uint8)])
    call = [wide, tall, *painted, rgba, half, rgba[..., :3]]
    found = shared.encode(call)
    assert len({rows.tobytes() for rows in found}) == len(call)
    for medium, rows in zip(call, found, strict=True):
        assert relative(rows, shared.encode(medium)[0]) <= 1e-5

    setting, value, _ = OVERRIDES[name]
    other = sharing(load(name, processor={setting: value}), shared)
    large = picture(280, 280)
    assert len(shared.encode(large)[0]) > len(other.encode(large)[0])
    assert len(shared.encode(large)[0]) > len(other.encode(large)[0])


@cache
def of_colour(name: str, value: int) -> np.ndarray:
    return encoder(name).encode(np.full((56, 56, 3), value, np.uint8))[0]


def test_s2_a_buffer_that_is_filled_again_at_once_does_not_leak_into_100_results_read_later(name: str):
    shared, buffer = encoder(name), np.zeros((56, 56, 3), np.uint8)
    results = []
    for number in range(100):
        buffer[...] = 2 * number
        results.append(shared.encode(buffer))
        buffer[...] = 255
    for number, found in enumerate(results):
        np.testing.assert_array_equal(found[0], of_colour(name, 2 * number))
    assert len({found[0].tobytes() for found in results}) == 100


def test_every_medium_of_the_family_together_is_finite_and_counted(name: str):
    shared = encoder(name)
    items = shared.prepare(media(name))
    found = shared.encode(items)
    assert [len(rows) for rows in found] == [item.tokens for item in items]
    assert all(np.isfinite(rows).all() for rows in found)


def test_the_table_of_cases_names_tests_that_exist(root: Path):
    table = [
        line for line in (root / "tests" / "README.md").read_text().splitlines() if re.match(r"\| [A-Z]\d \|", line)
    ]
    assert len(table) == 39
    for line in table:
        named = re.findall(r"`([\w/.]+)::(\w+)`", line)
        assert named, line
        for file, test in named:
            assert re.search(rf"^def {test}\(", (root / "tests" / file).read_text(), re.MULTILINE), f"{file}::{test}"
