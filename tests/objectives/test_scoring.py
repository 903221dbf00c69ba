import math

import pytest
import torch
from torch import Tensor
from truths import all_captions, closed_form, knowing_model, set_losses

from mdc.errors import UserError
from mdc.objectives import OBJECTIVES, scoring
from mdc.objectives.scoring import SCORERS, default_scorer, score

WORDS = [1, 5, 6, 7]  # [UNK] can stand in a caption
LIKELIHOODS = [("mdc", "mc"), ("mdc", "heuristic"), ("mdc", "unmask"), ("cappa", "autoregressive"), ("clip", "cosine")]


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(8))


def patches(model: torch.nn.Module, count: int = 2) -> Tensor:
    with torch.no_grad():
        return model.encode(images(count))


def captions(*rows: list[int], width: int = 0) -> Tensor:
    width = max(width, *map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def test_mc_meets_the_closed_form_within_its_standard_error(tiny_model) -> None:
    model, caption = tiny_model("mdc", t_min=0.0), [5, 7, 6, 3]
    with torch.no_grad():
        exact = -float(closed_form(set_losses(model, images(1), caption), 4, 0.001, 1.0))
    seeds = list(range(60))
    found = score(
        model, model.config, patches(model, 1).expand(60, -1, -1), captions(caption)[None], "mc", seeds, draws=64
    )
    mean, spread = float(found.value_MK.mean()), float(found.value_MK.std())
    assert abs(mean - exact) < 4 * spread / 60**0.5
    assert spread < 1.3 * float(found.stderr_MK.mean())  # stratified t makes the stated error a careful one
    assert float(found.stderr_MK.mean()) < 3 * spread


def test_captions_of_an_image_share_their_random_numbers(tiny_model) -> None:
    model = tiny_model("mdc")
    same = score(model, model.config, patches(model), captions([5, 6, 3], [5, 6, 3])[None], "mc", 3, draws=8)
    assert torch.equal(same.value_MK[:, 0], same.value_MK[:, 1])
    other = score(model, model.config, patches(model), captions([5, 6, 3])[None], "mc", [3, 4], draws=8)
    assert other.value_MK[0, 0] == pytest.approx(float(same.value_MK[0, 0]), abs=1e-5)
    assert abs(other.value_MK[1, 0] - same.value_MK[1, 0]) > 1e-4


@pytest.mark.parametrize(("objective", "name"), LIKELIHOODS)
def test_a_score_does_not_depend_on_batch_chunks_or_padding(tiny_model, monkeypatch, objective, name) -> None:
    model = tiny_model(objective, max_tokens=12)
    rows, seeds = [[5, 6, 3], [7, 6, 5, 5, 3], [3]], [11, 12, 13]
    whole = score(model, model.config, patches(model, 3), captions(*rows)[None], name, seeds, draws=6)
    assert whole.value_MK.isfinite().all()
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", 8)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 16)
    for m in range(3):
        for k, row in enumerate(rows):
            alone = score(
                model, model.config, patches(model, 3)[m : m + 1], captions(row, width=12)[None], name, [seeds[m]], 6
            )
            torch.testing.assert_close(alone.value_MK[0, 0], whole.value_MK[m, k], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(alone.stderr_MK[0, 0], whole.stderr_MK[m, k], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_unmask_gives_the_captions_of_a_length_probability_one(tiny_model, seed: int) -> None:
    model = tiny_model("mdc", seed=seed)
    every_CL = all_captions(WORDS, length=4, eos=3)
    value_MK = score(model, model.config, patches(model), every_CL[None], "unmask").value_MK
    torch.testing.assert_close(value_MK.exp().sum(1), torch.ones(2), atol=1e-5, rtol=0)
    assert value_MK.std(1).min() > 0.5  # far from uniform, so the order of unmasking differs between captions


def test_unmask_of_a_model_that_knows_is_the_true_likelihood(tiny_config) -> None:
    model = knowing_model(tiny_config("mdc"), seed=4)
    every_CL = model.decoder.captions_CL
    value_MK = score(model, model.config, torch.zeros(1, 1, 1), every_CL[None], "unmask").value_MK
    torch.testing.assert_close(value_MK[0], model.decoder.p_C.log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("objective", ["autoregressive", "cappa"])
def test_causal_probabilities_of_all_captions_sum_to_one(tiny_model, objective: str) -> None:
    model = tiny_model(objective)
    ended = 0.0
    for length in range(1, 5):
        every_CL = all_captions(WORDS, length, eos=3)
        ended += score(model, model.config, patches(model), every_CL[None]).value_MK.exp().sum(1)
        # captions that go on: any word in place of the end
        open_CL = torch.cat([torch.cat([every_CL[:, :-1], torch.full((len(every_CL), 1), w)], 1) for w in WORDS])
        unended = score(model, model.config, patches(model), open_CL[None]).value_MK.exp().sum(1)
        torch.testing.assert_close(ended + unended, torch.ones(2), atol=1e-5, rtol=0)
    assert ended.min() > 0.01


def test_heuristic_masks_each_token_alone(tiny_model) -> None:
    model, caption = tiny_model("mdc"), [5, 7, 6, 3]
    with torch.no_grad():
        losses = set_losses(model, images(1), caption)
    expected = -sum(float(losses[i,]) for i in range(4))
    found = score(model, model.config, patches(model, 1), captions(caption)[None], "heuristic")
    assert float(found.value_MK) == pytest.approx(expected, rel=1e-4)
    assert found.stderr_MK == 0


def test_cosine_compares_every_image_with_common_captions(tiny_model) -> None:
    model, texts = tiny_model("siglip"), captions([5, 6, 3], [7, 3])
    found = score(model, model.config, patches(model, 3), texts[None]).value_MK
    with torch.no_grad():
        expected = model.image_features(patches(model, 3)) @ model.text_features(texts, torch.tensor([2, 1])).T
    torch.testing.assert_close(found, expected)
    listed = score(model, model.config, patches(model, 3), texts[None].repeat(3, 1, 1)).value_MK
    torch.testing.assert_close(found, listed)


def test_the_blind_control_forgets_the_image(tiny_model) -> None:
    model, texts = tiny_model("mdc"), captions([5, 6, 3], [7, 3])[None]
    mean_1PD = patches(model, 4).mean(0, keepdim=True)
    blind = score(model, model.config, mean_1PD.expand(4, -1, -1), texts, "unmask").value_MK
    torch.testing.assert_close(blind, blind[:1].expand(4, -1))
    assert score(model, model.config, patches(model, 4), texts, "unmask").value_MK.std(0).min() > 1e-3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_scores_pairs_by_its_own_scorer(tiny_model, name: str) -> None:
    model, tokens_BL = tiny_model(name), captions([5, 6, 3], [7, 6, 5, 3])
    found = OBJECTIVES[name].score(model, images(2), tokens_BL, seed=1)
    expected = score(model, model.config, patches(model, 2), tokens_BL[:, None], default_scorer(name), seed=1)
    torch.testing.assert_close(found, expected.value_MK[:, 0])
    assert name in SCORERS[default_scorer(name)].objectives


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        ("mdc", {"scorer": "unmsk"}, "unknown scorer 'unmsk'.*did you mean 'unmask'.*autoregressive"),
        ("mdc", {"scorer": "cosine"}, "does not fit.*'mdc'; take mc, heuristic, unmask"),
        ("clip", {"scorer": "mc"}, "take cosine"),
        ("mdc", {"draws": 1}, "at least 2"),
        ("mdc", {"seed": [1, 2, 3]}, "3 seeds for 2 images"),
    ],
)
def test_mistakes_are_named_with_their_fix(tiny_model, objective: str, arguments: dict, message: str) -> None:
    model = tiny_model(objective)
    with pytest.raises(UserError, match=message):
        score(model, model.config, patches(model), captions([5, 3])[None], **arguments)
    with pytest.raises(UserError, match="longer than the model's 6"):
        score(model, model.config, patches(model), captions([5, 3], width=7)[None])


def test_scores_are_in_nats_and_negative(tiny_model) -> None:
    model = tiny_model("mdc")
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()  # uniform over the 5 ids that can occur
    found = score(model, model.config, patches(model), captions([5, 6, 3])[None], "heuristic").value_MK
    torch.testing.assert_close(found, torch.full((2, 1), -3 * math.log(5)))
