"""From the bytes that a server sent to the bytes that are stored: 8-bit RGB, upright, at training size.

A picture is decoded whole at once, so that no damaged one reaches a shard. What is refused is refused with a reason.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from mdc.config import DownloadParams

# What the web serves. Pillow reads more, among them formats that start other programs.
FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
WHITE_16_BIT = 65535
EXTENSIONS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}  # Pillow's names


class Rejected(Exception):
    """A picture that is not kept. `reason` is one word for counting, `detail` is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class StoredImage:
    """An encoded picture; width and height are of its own pixels, in their final orientation."""

    data: bytes
    width: int
    height: int
    original_width: int
    original_height: int
    mode: str  # Pillow's name for the pixels as they came, such as RGBA, CMYK, I;16


@contextmanager
def _pixel_limit(max_pixels: int) -> Iterator[None]:
    """Pillow refuses larger pictures before it allocates them; nested ones, as in icons, too."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _grey_16_bit(image: Image.Image) -> Image.Image:
    """White is 65535; Pillow's own conversion would cut every value above 255 to white."""
    values = np.asarray(image).astype(np.float64).clip(0, WHITE_16_BIT)
    return Image.fromarray((values * (255 / WHITE_16_BIT)).round().astype(np.uint8))


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """8-bit RGB of any mode, transparent parts blended over `background`. Raises Rejected for floating-point pixels."""
    if image.mode == "F":
        raise Rejected("mode", "floating-point pixels have no agreed range")
    if image.mode.startswith("I"):
        rgb = _grey_16_bit(image).convert("RGB")
        if "transparency" in image.info:  # of one grey value, which no conversion of Pillow's heeds
            rgb.paste(background, mask=Image.fromarray(np.asarray(image) == image.info["transparency"]))
        return rgb
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image).convert("RGB")
    return image.convert("RGB")


def _turn_upright(image: Image.Image) -> None:
    with suppress(Exception):  # a broken EXIF block raises whatever its bytes led to, and must not lose the picture
        ImageOps.exif_transpose(image, in_place=True)


def decode(
    data: bytes, background: tuple[int, int, int], max_pixels: int, max_aspect_ratio: float, min_side: int = 1
) -> tuple[Image.Image, str]:
    """The picture upright in 8-bit RGB, and the mode it came in. Raises Rejected.

    Reasons: decode, truncated, too_many_pixels, aspect_ratio, too_small, mode.
    """
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "somebody told Pillow to accept damaged pictures"
    if not data:
        raise Rejected("decode", "0 bytes")
    try:
        with _pixel_limit(max_pixels), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if max(width, height) > max_aspect_ratio * min(width, height):
                raise Rejected("aspect_ratio", f"{width}x{height}")
            if min(width, height) < min_side:
                raise Rejected("too_small", f"{width}x{height}")
            mode = image.mode
            image.load()
            _turn_upright(image)
            return to_rgb(image, background), mode
    except Rejected:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("too_many_pixels", f"above {max_pixels}") from None
    except UnidentifiedImageError:
        looks_like = "HTML or XML" if data.lstrip()[:1] == b"<" else "no known image format"
        raise Rejected("decode", looks_like) from None
    except (
        Exception
    ) as error:  # Pillow's parsers raise whatever the bytes led them to: OSError, SyntaxError, IndexError
        reason = "truncated" if "truncated" in str(error).lower() else "decode"
        raise Rejected(reason, f"{type(error).__name__}: {error}"[:200]) from None


def resize_shorter(image: Image.Image, size: int) -> Image.Image:
    """The same picture with its shorter side at `size` pixels, its aspect ratio kept, by antialiased Lanczos."""
    width, height = image.size
    scale = size / min(width, height)
    wanted = (max(size, round(width * scale)), max(size, round(height * scale)))
    return image if wanted == image.size else image.resize(wanted, Image.Resampling.LANCZOS)


def encode(image: Image.Image, image_format: str, quality: int) -> bytes:
    """JPEG without chroma subsampling, PNG, or WebP, with no metadata; equal pixels give equal bytes."""
    buffer = io.BytesIO()
    image.info = {}  # Pillow would write comments and colour profiles from there
    options: dict[str, int] = {} if image_format == "png" else {"quality": quality}
    if image_format == "jpg":
        options["subsampling"] = 0  # at training sizes the colour planes are too small to halve
    image.save(buffer, EXTENSIONS[image_format], **options)
    return buffer.getvalue()


def store(data: bytes, params: DownloadParams) -> StoredImage:
    """Decode, turn, flatten, resize and encode one picture. Raises Rejected."""
    red, green, blue = params.background
    limits = (params.max_pixels, params.max_aspect_ratio, params.min_side)
    image, mode = decode(data, (red, green, blue), *limits)
    original_width, original_height = image.size
    image = resize_shorter(image, params.image_size)
    encoded = encode(image, params.image_format, params.image_quality)
    return StoredImage(encoded, image.width, image.height, original_width, original_height, mode)
