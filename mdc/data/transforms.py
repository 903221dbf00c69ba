"""From stored pixels to the model's input, for a whole batch at once and on its device.

B: batch, C: channels, H: height, W: width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mdc.dist import to_device
from mdc.draws import Draws

MEAN = STD = 0.5  # of each channel in [0, 1]: timm's "inception" normalisation, pixels in [-1, 1]
LOG_RATIO = math.log(4 / 3)  # widest aspect ratio of a crop, either way


def normalise(images_BCHW: Tensor) -> Tensor:
    """uint8, in any memory layout, to contiguous float32 in [-1, 1]."""
    floats_BCHW = torch.empty(images_BCHW.shape, dtype=torch.float32, device=images_BCHW.device)
    return floats_BCHW.copy_(images_BCHW).div_(255 * STD).sub_(MEAN / STD)


def _resize(images_BCHW: Tensor, size: int) -> Tensor:
    return F.interpolate(images_BCHW, (size, size), mode="bilinear", antialias=True, align_corners=False)


def eval_images(images_BCHW: Tensor, size: int) -> Tensor:
    """uint8 of any size to float32 `[B, C, size, size]`: the centre square, resized with antialiasing, normalised."""
    height, width = images_BCHW.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square_BCHW = normalise(images_BCHW[..., top : top + side, left : left + side])
    return square_BCHW if side == size else _resize(square_BCHW, size)


def _crops(count: int, crop_min_area: float, flip: bool, draws: Draws) -> Tensor:
    """A random rectangle per picture, `[B, 4]`: half its width and height, and its middle, where the picture's corners
    lie at -1 and 1. A negative width is a mirrored picture.
    """
    area_B, ratio_B, x_B, y_B, mirror_B = draws.uniform(count, 5).unbind(1)
    area_B = crop_min_area + (1 - crop_min_area) * area_B
    ratio_B = torch.exp((2 * ratio_B - 1) * LOG_RATIO)
    width_B = (area_B * ratio_B).sqrt().clamp(max=1)
    height_B = (area_B / ratio_B).sqrt().clamp(max=1)
    sign_B = torch.where(mirror_B < 0.5, -1.0, 1.0) if flip else torch.ones(count)
    return torch.stack([sign_B * width_B, height_B, (2 * x_B - 1) * (1 - width_B), (2 * y_B - 1) * (1 - height_B)], 1)


def _grid(crops_B4: Tensor, size: int) -> Tensor:
    """Where the pixels `[size, size]` of the output lie in the picture, `[B, H, W, 2]` as (x, y).

    `F.affine_grid` for rectangles that are not turned, at a twentieth of its time.
    """
    middles_S = torch.linspace(-1, 1, size, device=crops_B4.device) * ((size - 1) / size)
    width_B1, height_B1, x_B1, y_B1 = crops_B4.split(1, 1)
    grid_BHW2 = crops_B4.new_empty(len(crops_B4), size, size, 2)
    grid_BHW2[..., 0] = (width_B1 * middles_S + x_B1)[:, None, :]
    grid_BHW2[..., 1] = (height_B1 * middles_S + y_B1)[:, :, None]
    return grid_BHW2


def train_images(images_BCHW: Tensor, size: int, crop_min_area: float, flip: bool, draws: Draws) -> Tensor:
    """uint8 square pictures to float32 `[B, C, size, size]`: a random rectangle of each, stretched and normalised.

    crop_min_area: smallest share of the picture's area; its aspect ratio lies in [3/4, 4/3]. flip: mirror half of them.
    draws: the same picture gets the same crop for any layout of ranks.
    """
    count, _, height, _ = images_BCHW.shape
    floats_BCHW = normalise(images_BCHW)
    if height > 2 * size:  # bilinear sampling would skip pixels
        floats_BCHW = _resize(floats_BCHW, 2 * size)
    crops_B4 = to_device(_crops(count, crop_min_area, flip, draws), images_BCHW.device)
    return F.grid_sample(
        floats_BCHW, _grid(crops_B4, size), mode="bilinear", padding_mode="border", align_corners=False
    )
