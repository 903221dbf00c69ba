import pytest
import torch
from torch import Tensor
from truths import closed_form, knowing_model, mean_over_orders, set_losses

from mdc.draws import Draws
from mdc.model.captioner import Captioner
from mdc.objectives import OBJECTIVES, TextImage

CAPTION = [5, 7, 6, 5, 3]
CAPTIONING = ("mdc", "cmlm", "bert", "autoregressive", "cappa")
FLOOR = 0.001


def image(count: int = 1) -> Tensor:
    return torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5)).expand(count, -1, -1, -1)


def batch(*rows: list[int], width: int = 0) -> TextImage:
    width = max(width, *map(len, rows))
    tokens_BL = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    images_BCHW = torch.randn(len(rows), 3, 16, 16, generator=torch.Generator().manual_seed(6))
    return TextImage(images_BCHW, tokens_BL)


def flat_gradient(model: Captioner, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("t_min", "t_max"), [(0.0, 1.0), (0.5, 1.0), (0.2, 0.6)])
def test_the_monte_carlo_loss_and_gradient_meet_the_closed_form(tiny_model, t_min: float, t_max: float) -> None:
    model, objective, B = tiny_model("mdc", t_min=t_min, t_max=t_max), OBJECTIVES["mdc"], 512
    exact = closed_form(set_losses(model, image(), CAPTION), 5, max(t_min, FLOOR), t_max)
    exact_gradient = flat_gradient(model, exact)
    direction = exact_gradient / exact_gradient.norm()
    inputs = TextImage(image(B), torch.tensor([CAPTION]).expand(B, -1))
    losses, slopes = [], []
    for seed in range(24):
        total, count = objective.loss(model, inputs, torch.Generator().manual_seed(seed))
        assert count == 5 * B
        slopes.append(flat_gradient(model, total / B) @ direction)
        losses.append(total.detach() / B)
    for found, truth in ((torch.stack(losses), exact.detach()), (torch.stack(slopes), exact_gradient.norm())):
        error = found.std() / len(found) ** 0.5
        assert error < 0.02 * truth
        assert abs(found.mean() - truth) < 4 * error


def test_the_closed_form_is_the_mean_over_all_orders(tiny_model) -> None:
    with torch.no_grad():
        losses = set_losses(tiny_model("mdc", seed=3), image(), CAPTION)
    assert float(closed_form(losses, 5, 0.0, 1.0)) == pytest.approx(mean_over_orders(losses, 5), rel=1e-5)


def test_a_model_that_knows_the_distribution_reaches_its_entropy(tiny_config) -> None:
    model = knowing_model(tiny_config("mdc", t_min=0.0))
    captions_CL, p_C = model.decoder.captions_CL, model.decoder.p_C
    entropy = float(-(p_C * p_C.log()).sum())
    exact = sum(
        float(p * closed_form(set_losses(model, image(), caption.tolist()), 4, 0.0, 1.0))
        for caption, p in zip(captions_CL, p_C, strict=True)
    )
    assert exact == pytest.approx(entropy, rel=1e-4)
    draw = torch.Generator().manual_seed(0)
    means = []
    for seed in range(40):
        tokens_BL = captions_CL[torch.multinomial(p_C, 2000, replacement=True, generator=draw)]
        total, _ = OBJECTIVES["mdc"].loss(model, TextImage(image(2000), tokens_BL), torch.Generator().manual_seed(seed))
        means.append(total / 2000)
    found = torch.stack(means)
    assert abs(found.mean() - entropy) < 4 * found.std() / len(found) ** 0.5 + 2 * FLOOR * entropy


@pytest.mark.parametrize("name", CAPTIONING)
def test_loss_and_gradient_do_not_change_with_padding(tiny_model, name: str) -> None:
    rows = [[5, 6, 3], [7, 5, 6, 6, 3], [3]]
    model, found = tiny_model(name, max_tokens=12), []
    for width in (5, 12):
        total, count = OBJECTIVES[name].loss(model, batch(*rows, width=width), Draws.at(1, width=12))
        found.append((total.detach(), count, flat_gradient(model, total)))
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CAPTIONING)
def test_captions_of_one_token_are_finite_at_every_t(tiny_model, name: str) -> None:
    model = tiny_model(name, t_min=0.0)
    for seed in range(30):
        total, count = OBJECTIVES[name].loss(model, batch([3], [3]), torch.Generator().manual_seed(seed))
        assert total.isfinite()
        assert count in (0, 1, 2)
        assert flat_gradient(model, total).isfinite().all()


@pytest.mark.parametrize("name", CAPTIONING)
def test_a_batch_without_tokens_contributes_exactly_nothing(tiny_model, name: str) -> None:
    model = tiny_model(name)
    total, count = OBJECTIVES[name].loss(model, batch([0, 0], [0, 0]), torch.Generator().manual_seed(0))
    assert (total, count) == (0, 0)
    gradient = flat_gradient(model, total)
    assert len(gradient) == sum(p.numel() for p in model.parameters())  # every rank must hand in every gradient
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_weight_takes_part(tiny_model, name: str) -> None:
    model = tiny_model(name, image_drop=0.2 if name in CAPTIONING else 0.0)
    total, _ = OBJECTIVES[name].loss(model, batch(CAPTION, [6, 5, 3]), torch.Generator().manual_seed(0))
    total.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", CAPTIONING)
def test_parts_of_a_batch_add_up_to_the_whole(tiny_model, name: str) -> None:
    rows = [[5, 6, 3], [7, 5, 6, 6, 3], [5, 3], [6, 6, 5, 7, 5, 3]]
    model, whole = tiny_model(name, image_drop=0.3), batch(*rows)
    total, count = OBJECTIVES[name].loss(model, whole, Draws.at(4, total=4, width=6))
    gradient = flat_gradient(model, total / count)
    sums = []
    for first in range(4):
        part = TextImage(whole.images_BCHW[first : first + 1], whole.tokens_BL[first : first + 1, : len(rows[first])])
        sums.append(OBJECTIVES[name].loss(model, part, Draws.at(4, first=first, total=4, width=6)))
    assert sum(n for _, n in sums) == count
    torch.testing.assert_close(flat_gradient(model, sum(s for s, _ in sums) / count), gradient, atol=1e-6, rtol=1e-4)


def test_what_each_loss_is_divided_by(tiny_model) -> None:
    inputs = batch(*[[5, 6, 7, 3], [5, 3]] * 50)
    counts = {
        name: OBJECTIVES[name].loss(tiny_model(name, bert_ratio=0.5), inputs, torch.Generator().manual_seed(0))[1]
        for name in CAPTIONING
    }
    assert counts["mdc"] == counts["autoregressive"] == counts["cappa"] == 300
    assert 180 < counts["cmlm"] < 270  # t in [0.5, 1]
    assert 120 < counts["bert"] < 180


def test_without_its_image_a_caption_has_the_loss_of_no_image(tiny_model) -> None:
    model = tiny_model("autoregressive", image_drop=0.999999)
    one, other = batch(CAPTION), TextImage(torch.zeros(1, 3, 16, 16), torch.tensor([CAPTION]))
    losses = [
        OBJECTIVES["autoregressive"].loss(model, inputs, torch.Generator().manual_seed(0))[0] for inputs in (one, other)
    ]
    assert losses[0] == losses[1]
    seen = tiny_model("autoregressive")
    with torch.no_grad():
        losses = [OBJECTIVES["autoregressive"].loss(seen, inputs, torch.Generator())[0] for inputs in (one, other)]
    assert abs(losses[0] - losses[1]) > 1e-3
