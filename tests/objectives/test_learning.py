import pytest
import torch
from torch import Tensor

from mdc.draws import Draws
from mdc.objectives import OBJECTIVES, TextImage
from mdc.objectives.scoring import score

COLOURS = torch.eye(3)  # red, green and blue pictures, captioned 5, 6 and 7 behind a word that says nothing
CAPTIONS = torch.tensor([[8, 5, 3], [8, 6, 3], [8, 7, 3]])


def pictures(kinds_B: Tensor, draws: torch.Generator) -> Tensor:
    noise_BCHW = 0.3 * torch.randn(len(kinds_B), 3, 16, 16, generator=draws)
    return 2 * COLOURS[kinds_B][:, :, None, None] - 1 + noise_BCHW


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_learns_to_tell_pictures_apart_and_a_blind_one_does_not(tiny_config, name: str) -> None:
    config = tiny_config(name, words=4)
    draws = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OBJECTIVES[name].build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        kinds_B = torch.randint(3, (32,), generator=draws)
        inputs = TextImage(pictures(kinds_B, draws), CAPTIONS[kinds_B])
        total, count = OBJECTIVES[name].loss(model, inputs, Draws.at(0, step, width=config.max_tokens))
        optimizer.zero_grad()
        (total / count.clamp(min=1)).backward()
        optimizer.step()
    model.eval()
    kinds_M = torch.arange(3).repeat(10)
    with torch.no_grad():
        patches_MPD = model.encode(pictures(kinds_M, draws))
    chosen_M = score(model, config, patches_MPD, CAPTIONS[None]).value_MK.argmax(1)
    assert (chosen_M == kinds_M).float().mean() > 0.9
    blind_MPD = patches_MPD.mean(0, keepdim=True).expand_as(patches_MPD)
    blind_M = score(model, config, blind_MPD, CAPTIONS[None]).value_MK.argmax(1)
    assert (blind_M == kinds_M).float().mean() == pytest.approx(1 / 3)
