"""Pictures as users give them: PIL images, paths or tensors, one or many."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mdc.data.images import Rejected, decode, to_rgb
from mdc.errors import UserError

WHITE = (255, 255, 255)  # under transparent pixels
MAX_PIXELS = 100_000_000

ImageLike = Image.Image | str | PathLike[str]
Images = ImageLike | Sequence[ImageLike] | Tensor


def as_list(images: Images) -> Sequence[ImageLike] | Tensor:
    if isinstance(images, Tensor):
        return images[None] if images.ndim == 3 else images
    return [images] if isinstance(images, Image.Image | str | PathLike) else list(images)


def as_rgb(image: ImageLike) -> Image.Image:
    """8-bit RGB, upright, transparent parts on white."""
    try:
        if isinstance(image, Image.Image):
            return to_rgb(image, WHITE)
        rgb, _ = decode(Path(image).read_bytes(), WHITE, MAX_PIXELS, max_aspect_ratio=float("inf"))
        return rgb
    except OSError as error:
        raise UserError(f"picture {image} could not be opened: {error.strerror}") from None
    except Rejected as error:
        raise UserError(f"{image} is not a picture that can be read: {error}") from None


def as_pixels(image: ImageLike) -> Tensor:
    """uint8 `[3, H, W]`, upright, transparent parts on white."""
    return torch.from_numpy(np.asarray(as_rgb(image)).copy()).permute(2, 0, 1)


def as_bytes(images_BCHW: Tensor) -> Tensor:
    """A tensor of uint8, or of floats in [0, 1], on the scale of bytes, 0 to 255."""
    if images_BCHW.ndim != 4 or images_BCHW.shape[1] != 3:
        raise UserError(f"images of shape {list(images_BCHW.shape)}; give [B, 3, H, W]")
    if not images_BCHW.is_floating_point():
        return images_BCHW
    low, high = images_BCHW.aminmax()
    if low < 0 or high > 1:
        raise UserError(f"float images lie in {float(low):.3g}..{float(high):.3g}; scale them to 0..1, or give uint8")
    return images_BCHW * 255
