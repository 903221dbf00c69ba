"""Pictures on the device: colours, orientation and place stay what they are, and no rank changes a crop."""

import pytest
import torch
from torch import Tensor

from mdc.data.transforms import _crops, _grid, eval_images, normalise, train_images
from mdc.draws import Draws


def noise(count: int, height: int = 20, width: int = 20) -> Tensor:
    return torch.randint(
        0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def gradients(count: int, size: int) -> Tensor:
    """Red grows to the right, green downwards, blue is 40."""
    ramp = torch.linspace(0, 255, size)
    red = ramp.expand(size, size)
    picture = torch.stack([red, red.T, torch.full((size, size), 40.0)]).round().to(torch.uint8)
    return picture.expand(count, 3, size, size)


def test_normalisation_spans_minus_one_to_one() -> None:
    assert normalise(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]
    assert normalise(torch.tensor([51], dtype=torch.uint8)).item() == pytest.approx(51 / 127.5 - 1)


def test_any_memory_layout_gives_the_same_numbers() -> None:
    images = noise(3)
    side_by_side = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(normalise(side_by_side), normalise(images))
    assert normalise(side_by_side).is_contiguous()
    draws = [Draws.at(0, "crop") for _ in range(2)]
    one, other = (train_images(x, 16, 0.5, True, draw) for x, draw in zip((images, side_by_side), draws, strict=True))
    assert torch.equal(one, other)


@pytest.mark.parametrize("size", [16, 37, 224])
def test_crops_lie_where_an_affine_map_puts_them(size: int) -> None:
    crops = _crops(8, 0.3, True, Draws.at(0, "crop"))
    width, height, x, y = crops.unbind(1)
    none = torch.zeros(8)
    maps = torch.stack([torch.stack([width, none, x], 1), torch.stack([none, height, y], 1)], 1)
    expected = torch.nn.functional.affine_grid(maps, [8, 3, size, size], align_corners=False)
    assert torch.allclose(_grid(crops, size), expected, atol=1e-6)


def test_evaluation_keeps_pixels_at_the_same_size_and_averages_at_smaller() -> None:
    images = noise(3)
    assert torch.equal(eval_images(images, 20), normalise(images))
    wide = noise(2, 20, 30)
    assert torch.equal(eval_images(wide, 20), normalise(wide[..., 5:25]))
    board = ((torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255).to(torch.uint8).expand(1, 3, 32, 32)
    assert eval_images(board, 8)[..., 1:-1, 1:-1].abs().max() < 0.05


def test_a_crop_of_everything_is_the_picture() -> None:
    """With the whole area kept, only the aspect ratio is left to change; a draw of 1/2 is the square."""

    class Middle(Draws):
        def uniform(self, rows: int, columns: int | None = None) -> Tensor:
            return torch.full((rows, columns or 1), 0.5)

    images = noise(4)
    out = train_images(images, 20, 1.0, False, Middle(torch.Generator()))
    assert torch.allclose(out, normalise(images), atol=1e-4)


def test_crops_keep_colours_and_orientation() -> None:
    out = train_images(gradients(64, 40), 32, 0.3, False, Draws.at(0, "crop"))
    assert out.shape == (64, 3, 32, 32)
    assert out.abs().max() <= 1 + 1e-5
    assert (out[:, 0].diff(dim=2) >= -1e-5).all()  # red still grows to the right
    assert (out[:, 1].diff(dim=1) >= -1e-5).all()  # green still grows downwards
    assert torch.allclose(out[:, 2], torch.tensor(40 / 127.5 - 1), atol=1e-5)


def test_crops_have_the_area_and_ratio_asked_for() -> None:
    out = train_images(gradients(2000, 64), 32, 0.3, False, Draws.at(0, "crop"))
    # the ramp's rise over the output, from the middle of the first pixel to that of the last, is the crop's share
    width = (out[:, 0, 16, -2] - out[:, 0, 16, 1]) / 2 * 63 / 64 * 32 / 29
    height = (out[:, 1, -2, 16] - out[:, 1, 1, 16]) / 2 * 63 / 64 * 32 / 29
    area, ratio = width * height, width / height
    assert area.min() > 0.27
    assert area.max() < 1.03
    assert abs(area.mean().item() - 0.65) < 0.03
    assert ratio.min() > 0.7
    assert ratio.max() < 1.4
    left = out[:, 0, 16, 0]
    assert left.min() < -0.97  # crops touch the left edge
    assert left.max() > -0.3  # and lie far from it


def test_flips_mirror_half_of_the_pictures_and_only_sideways() -> None:
    out = train_images(gradients(1000, 40), 32, 0.5, True, Draws.at(0, "crop"))
    mirrored = out[:, 0, 16, -1] < out[:, 0, 16, 0]
    assert 0.45 < mirrored.float().mean() < 0.55
    assert (out[:, 1].diff(dim=1) >= -1e-5).all()


def test_rows_get_the_same_crop_on_any_rank() -> None:
    images = noise(8)
    whole = train_images(images, 16, 0.5, True, Draws.at(1, 2, "crop", total=8))
    parts = [
        train_images(images[i : i + 2], 16, 0.5, True, Draws.at(1, 2, "crop", first=i, total=8)) for i in range(0, 8, 2)
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, train_images(images, 16, 0.5, True, Draws.at(1, 3, "crop", total=8)))


def test_much_larger_pictures_are_averaged_before_they_are_sampled() -> None:
    board = ((torch.arange(128)[:, None] + torch.arange(128)) % 2 * 255).to(torch.uint8).expand(4, 3, 128, 128)
    out = train_images(board, 16, 0.9, False, Draws.at(0, "crop"))
    assert out[..., 2:-2, 2:-2].abs().max() < 0.1
