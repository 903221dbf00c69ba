"""Every stored picture is 8-bit RGB, upright, whole and of the wanted size; what cannot be is refused with a reason."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from misbehaving import bomb
from PIL import Image, ImageCms

from mdc.config import DownloadParams
from mdc.data.images import Rejected, decode, store

WHITE = (255, 255, 255)
PARAMS = DownloadParams(image_size=8, image_format="png")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def stored_pixels(data: bytes, params: DownloadParams = PARAMS) -> np.ndarray:
    image = Image.open(io.BytesIO(store(data, params).data))
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def test_hidden_colour_of_transparent_pixels_gives_way_to_the_background() -> None:
    transparent = Image.new("RGBA", (8, 8), (0, 255, 0, 0))
    assert (stored_pixels(encoded(transparent)) == 255).all()
    blue = PARAMS.model_copy(update={"background": [0, 0, 255]})
    assert (stored_pixels(encoded(transparent), blue) == [0, 0, 255]).all()
    half = Image.new("RGBA", (8, 8), (0, 255, 0, 128))
    assert np.abs(stored_pixels(encoded(half)) - [127, 255, 127]).max() <= 1


def test_transparency_of_grey_and_palette_pictures() -> None:
    assert (stored_pixels(encoded(Image.new("LA", (8, 8), (0, 0)))) == 255).all()
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 255, 0, 255, 0, 0])
    palette.paste(1, (0, 0, 8, 4))
    pixels = stored_pixels(encoded(palette, transparency=0))
    assert (pixels[:4] == [255, 0, 0]).all()
    assert (pixels[4:] == 255).all()


def test_cmyk_and_16_bit_grey() -> None:
    cmyk = store(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"), PARAMS)
    assert cmyk.mode == "CMYK"
    assert (stored_pixels(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")) >= 254).all()
    grey = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    assert (stored_pixels(encoded(grey)) == 156).all()
    assert (stored_pixels(encoded(Image.new("1", (8, 8), 1))) == 255).all()


def png_16_bit(colour_type: int, values: list[int], **chunks: bytes) -> bytes:
    """Eight by eight pixels of the same 16-bit values, in a file that Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = b"\0" + struct.pack(f">{8 * len(values)}H", *values * 8)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, colour_type, 0, 0, 0))]
    parts += [chunk(name.encode(), data) for name, data in chunks.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", zlib.compress(row * 8)), chunk(b"IEND", b"")])


@pytest.mark.parametrize(
    ("colour_type", "values", "expected"),
    [
        (0, [40_000], [156, 156, 156]),
        (2, [40_000, 20_000, 0], [156, 78, 0]),
        (4, [40_000, 65_535], [156, 156, 156]),
        (4, [40_000, 0], [255, 255, 255]),
        (6, [0, 40_000, 0, 0], [255, 255, 255]),
    ],
)
def test_16_bits_of_every_kind(colour_type: int, values: list[int], expected: list[int]) -> None:
    assert (stored_pixels(png_16_bit(colour_type, values)) == expected).all()


def test_a_transparent_value_of_16_bit_grey() -> None:
    assert (stored_pixels(png_16_bit(0, [40_000], tRNS=struct.pack(">H", 40_000))) == 255).all()
    assert (stored_pixels(png_16_bit(0, [40_000], tRNS=struct.pack(">H", 40_001))) == 156).all()


def test_other_ways_of_colour() -> None:
    assert (stored_pixels(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "TIFF")) == [0, 255, 255]).all()
    assert (stored_pixels(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG")) <= 1).all()
    assert np.abs(stored_pixels(encoded(Image.new("LAB", (8, 8), (128, 128, 128)), "TIFF")) - 119).max() <= 1
    for kind in ("WEBP", "AVIF", "JPEG2000"):
        assert (stored_pixels(encoded(Image.new("RGBA", (8, 8), (0, 255, 0, 0)), kind)) == 255).all(), kind


# where the red half of a picture that is red on the left lies after each EXIF orientation is applied
RED_HALF = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}


@pytest.mark.parametrize("orientation", RED_HALF)
def test_exif_orientation_is_applied(orientation: int) -> None:
    image = Image.new("RGB", (40, 20), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    result = store(encoded(image, "JPEG", exif=exif, quality=95), PARAMS.model_copy(update={"image_size": 20}))
    side = RED_HALF[orientation]
    assert (result.width, result.height) == ((40, 20) if side in ("left", "right") else (20, 40))
    assert (result.original_width, result.original_height) == (result.width, result.height)
    picture = Image.open(io.BytesIO(result.data))
    assert picture.size == (result.width, result.height)
    assert not picture.getexif()
    middle = {"left": (5, 10), "right": (35, 10), "top": (10, 5), "bottom": (10, 35)}[side]
    red, _, blue = picture.getpixel(middle)
    assert red > 200
    assert blue < 50


def test_broken_exif_does_not_lose_the_picture() -> None:
    data = encoded(Image.new("RGB", (16, 8), (200, 0, 0)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")
    assert store(data, PARAMS).width == 16


def reason(data: bytes, **options: Any) -> str:
    with pytest.raises(Rejected) as caught:
        store(data, PARAMS.model_copy(update=options))
    return caught.value.reason


def test_damaged_bodies_are_refused() -> None:
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 255, (64, 64, 3), np.uint8)
    for kind in ("JPEG", "PNG"):
        whole = encoded(Image.fromarray(noise), kind)
        assert reason(whole[: len(whole) // 2]) == "truncated"
        assert store(whole, PARAMS).width == 8
    assert reason(b"") == "decode"
    assert reason(b"<html>404</html>") == "decode"
    assert reason(b"\x89PNG\r\n\x1a\n" + b"\0" * 100) == "decode"
    assert reason(bomb()) == "too_many_pixels"
    assert reason(encoded(Image.new("RGB", (20, 20))), max_pixels=399) == "too_many_pixels"
    assert store(encoded(Image.new("RGB", (20, 20))), PARAMS.model_copy(update={"max_pixels": 400})).width == 8
    assert reason(encoded(Image.new("RGB", (2000, 1)))) == "aspect_ratio"
    assert reason(encoded(Image.new("RGB", (7, 9)))) == "too_small"
    assert reason(encoded(Image.new("F", (8, 8), 0.5), "TIFF")) == "mode"


@pytest.mark.parametrize("image_format", ["jpg", "png", "webp"])
def test_nothing_but_pixels_is_stored(image_format: str) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = encoded(Image.new("RGB", (8, 8)), "JPEG", comment="secret", icc_profile=profile, exif=Image.Exif())
    stored = store(data, PARAMS.model_copy(update={"image_format": image_format})).data
    assert b"secret" not in stored
    assert not {"comment", "icc_profile", "exif"} & set(Image.open(io.BytesIO(stored)).info)


def test_pillow_is_left_as_it_was() -> None:
    before = Image.MAX_IMAGE_PIXELS
    decode(encoded(Image.new("RGB", (4, 4))), WHITE, 100, 4.0)
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 50), (16, 8)), ((50, 100), (8, 16)), ((10, 9), (9, 8)), ((8, 8), (8, 8))]
)
def test_shorter_side_gets_the_size_and_the_ratio_stays(size: tuple[int, int], expected: tuple[int, int]) -> None:
    result = store(encoded(Image.new("RGB", size)), PARAMS)
    assert (result.width, result.height) == expected
    assert (result.original_width, result.original_height) == size


def test_downscaling_averages() -> None:
    """A checkerboard of single pixels becomes grey; sampling without antialiasing would keep black or white."""
    board = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)
    pixels = stored_pixels(encoded(Image.fromarray(board)))
    assert np.abs(pixels[1:-1, 1:-1] - 127).max() < 12


@pytest.mark.parametrize("image_format", ["jpg", "png", "webp"])
def test_formats_keep_colours_and_are_deterministic(image_format: str) -> None:
    params = PARAMS.model_copy(update={"image_format": image_format})
    image = Image.new("RGB", (8, 8), (250, 30, 40))
    image.paste((20, 60, 240), (0, 0, 8, 4))
    data = encoded(image)
    assert store(data, params).data == store(data, params).data
    pixels = stored_pixels(data, params)
    assert np.abs(pixels[0, 0] - [20, 60, 240]).max() < 12
    assert np.abs(pixels[7, 7] - [250, 30, 40]).max() < 12
