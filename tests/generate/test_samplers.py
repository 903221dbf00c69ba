from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from truths import all_captions, knowing_model

from mdc.errors import UserError
from mdc.generate import SAMPLERS, default_sampler, fill, generate
from mdc.generate.samplers import pick
from mdc.model.captioner import Captioner
from mdc.objectives.scoring import score

PAD, BOS, EOS, MASK = 0, 2, 3, 4
WORDS = [1, 5, 6, 7]  # [UNK] can stand in a caption


def patches(model: Captioner, count: int = 3) -> Tensor:
    with torch.no_grad():
        return model.encode(torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(8)))


def distance(found: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Total variation between the rows found and a distribution over rows."""
    counts = Counter(map(tuple, found.tolist()))
    rows = counts.keys() | expected.keys()
    return sum(abs(counts[row] / len(found) - expected.get(row, 0.0)) for row in rows) / 2


@torch.no_grad()
def best_first(model: Captioner, patches_1PD: Tensor, length: int) -> list[int]:
    """Greedy best-first unmasking by plain passes."""
    state = [MASK] * (length - 1) + [EOS]
    while MASK in state:
        hidden_1LD = model.decoder(torch.tensor([state]), model.decoder.keys(patches_1PD))
        p_LV = model.decoder.logits(hidden_1LD[0]).softmax(1)
        p_LV[:, EOS] = 0
        p_LV /= p_LV.sum(1, keepdim=True)
        gaps = [i for i, token in enumerate(state) if token == MASK]
        place = max(gaps, key=lambda i: float(p_LV[i].max()))
        state[place] = int(p_LV[place].argmax())
    return state


@torch.no_grad()
def left_to_right(model: Captioner, patches_1PD: Tensor, length: int) -> list[int]:
    """Greedy decoding by plain causal passes without a cache."""
    state = [BOS]
    while state[-1] != EOS and len(state) <= length:
        hidden_1LD = model.decoder(torch.tensor([state]), model.decoder.keys(patches_1PD), is_causal=True)
        token = int(model.decoder.logits(hidden_1LD[0, -1:]).argmax())
        state.append(EOS if len(state) == length else token)
    return state[1:]


def test_confidence_sampling_is_best_first(tiny_model) -> None:
    captions = set()
    for seed in range(5):
        model = tiny_model("mdc", seed=seed, words=20)
        found = generate(model, model.config, patches(model), length=6).tokens_ML.tolist()
        assert found == [best_first(model, patches(model)[m : m + 1], 6) for m in range(3)]
        captions |= set(map(tuple, found))
    assert len(captions) > 5  # images matter
    assert any(len(set(caption[:-1])) > 1 for caption in captions)  # and so do the words that are there


@pytest.mark.parametrize(
    ("sampler", "steps", "states"), [("confidence", None, 6), ("confidence", 2, 3), ("ancestral", 4, 5)]
)
def test_the_trace_goes_from_gaps_to_words(tiny_model, sampler: str, steps: int | None, states: int) -> None:
    model = tiny_model("mdc")
    found = generate(model, model.config, patches(model), 6, sampler, steps=steps, trace=True, temperature=1.0)
    assert len(found.trace) == states
    assert found.trace[0].tolist() == [[MASK] * 5 + [EOS]] * 3
    assert torch.equal(found.trace[-1], found.tokens_ML)
    for before, after in zip(found.trace, found.trace[1:], strict=False):
        given = before != MASK
        assert torch.equal(before[given], after[given])
    assert all(token in WORDS for row in found.tokens_ML.tolist() for token in row[:-1])
    assert (found.tokens_ML[:, -1] == EOS).all()


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mdc", {"sampler": "confidence"}),
    ("mdc", {"sampler": "confidence", "temperature": 1.0, "steps": 2}),
    ("mdc", {"sampler": "ancestral", "guidance": 1.5, "top_p": 0.9}),
    ("mdc", {"length": "auto", "temperature": 1.0}),
    ("cappa", {}),
    ("cappa", {"temperature": 1.0, "guidance": 1.5}),
    ("cappa", {"beams": 3}),
]


@pytest.mark.parametrize(("objective", "options"), OPTIONS)
@pytest.mark.parametrize("seeds", [7, [7, 8, 9]])
def test_a_caption_does_not_depend_on_its_batch(
    tiny_model, objective: str, options: dict, seeds: int | list[int]
) -> None:
    model = tiny_model(objective, image_drop=0.1)
    options = {"length": 6, **options}
    together = generate(model, model.config, patches(model), seed=seeds, **options).tokens_ML
    for m in range(3):
        own = seeds if isinstance(seeds, int) else [seeds[m]]
        alone = generate(model, model.config, patches(model)[m : m + 1], seed=own, **options).tokens_ML
        width = alone.shape[1]
        assert torch.equal(alone[0], together[m, :width])
        assert (together[m, width:] == PAD).all()


def test_seeds_give_different_captions_and_the_same_seed_the_same(tiny_model) -> None:
    model = tiny_model("mdc")
    one_MPD = patches(model, 1).expand(20, -1, -1)
    different = generate(model, model.config, one_MPD, 6, "ancestral", seed=list(range(20))).tokens_ML
    assert len(set(map(tuple, different.tolist()))) > 5
    assert len(set(map(tuple, generate(model, model.config, one_MPD, 6, "ancestral", seed=3).tokens_ML.tolist()))) == 1


def test_ancestral_sampling_draws_from_what_the_model_knows(tiny_config) -> None:
    model = knowing_model(tiny_config("mdc"))
    truth = {tuple(row.tolist()): float(p) for row, p in zip(model.decoder.captions_CL, model.decoder.p_C, strict=True)}
    blank_MPD, seeds = torch.zeros(1000, 1, 1), list(range(1000))
    many = generate(model, model.config, blank_MPD, 4, "ancestral", steps=60, seed=seeds).tokens_ML
    once = generate(model, model.config, blank_MPD, 4, "ancestral", steps=1, seed=seeds).tokens_ML
    assert distance(many, truth) < 0.1
    assert distance(once, truth) > 0.2  # all gaps at once: words that do not belong together


def test_autoregressive_sampling_draws_from_the_model(tiny_model) -> None:
    model = tiny_model("autoregressive")
    every = [row for length in (1, 2) for row in all_captions(WORDS, length, EOS).tolist()]
    cut = [[a, b, EOS] for a in WORDS for b in WORDS]  # the end comes by force, whatever its probability
    one_MPD = patches(model, 1)
    truth = {}
    for row in every + cut:
        tokens_11L = torch.tensor([[row]])
        value = score(model, model.config, one_MPD, tokens_11L).value_MK
        if len(row) == 3:
            ends = [
                score(model, model.config, one_MPD, torch.tensor([[[*row[:2], t]]])).value_MK for t in (*WORDS, EOS)
            ]
            value = torch.stack(ends).logsumexp(0)
        truth[tuple(row + [PAD] * (3 - len(row)))] = float(value.exp())
    assert sum(truth.values()) == pytest.approx(1, abs=1e-4)
    seeds = list(range(3000))
    found = generate(model, model.config, one_MPD.expand(3000, -1, -1), 3, temperature=1.0, seed=seeds).tokens_ML
    assert distance(found, truth) < 0.05
    cold = generate(model, model.config, one_MPD.expand(3000, -1, -1), 3, temperature=0.3, seed=seeds).tokens_ML
    assert distance(cold, truth) > 0.1


def test_greedy_decoding_with_a_cache_equals_plain_passes(tiny_model) -> None:
    for seed in range(4):
        model = tiny_model("cappa", seed=seed, max_tokens=8)
        found = generate(model, model.config, patches(model), length=8).tokens_ML
        for m, row in enumerate(found.tolist()):
            expected = left_to_right(model, patches(model)[m : m + 1], 8)
            assert [token for token in row if token != PAD] == expected


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_best_caption(tiny_model, seed: int) -> None:
    model = tiny_model("autoregressive", seed=seed)
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.self_attention.out.weight *= 10  # so that earlier words matter
    captions = [row for length in (1, 2, 3, 4) for row in all_captions(WORDS, length, EOS).tolist()]
    padded = torch.tensor([row + [PAD] * (4 - len(row)) for row in captions])
    value_MK = score(model, model.config, patches(model), padded[None]).value_MK / (padded != PAD).sum(1)
    found = generate(model, model.config, patches(model), 4, beams=85).tokens_ML
    assert torch.equal(found, padded[value_MK.argmax(1), : found.shape[1]])
    narrow = generate(model, model.config, patches(model), 4, beams=2).tokens_ML
    assert ((narrow == EOS).sum(1) == 1).all()


def test_templates_keep_their_words(tiny_model) -> None:
    model = tiny_model("mdc")
    templates = [[5, MASK, 7, MASK, EOS], [MASK, 6, EOS], [5, 6, EOS]]
    found = fill(model, model.config, patches(model), templates, seed=1, temperature=1.0)
    for row, template in zip(found.tolist(), templates, strict=True):
        for token, given in zip(row, template, strict=False):
            assert token == given or (given == MASK and token in WORDS)
        assert row[len(template) :] == [PAD] * (len(row) - len(template))
    common = fill(model, model.config, patches(model), [5, MASK, EOS], sampler="ancestral")
    assert common[:, [0, 2]].tolist() == [[5, EOS]] * 3


def test_guidance_moves_away_from_what_is_said_without_an_image(tiny_model) -> None:
    model = tiny_model("mdc", image_drop=0.2)
    start_ML = torch.tensor([[MASK, EOS]]).expand(3, -1)
    with torch.no_grad():
        keys = (model.decoder.keys(patches(model)), model.null_keys())
        with_MV, without_MV = (
            model.decoder.logits(model.decoder(start_ML, k)[:, 0])[:, WORDS].log_softmax(1) for k in keys
        )
    seeds = list(range(600))
    for guidance in (0.0, 1.0, 3.0):
        p_MV = (without_MV + guidance * (with_MV - without_MV)).softmax(1)
        found = generate(
            model,
            model.config,
            patches(model)[:1].expand(600, -1, -1),
            2,
            "ancestral",
            guidance=guidance,
            seed=seeds,
        ).tokens_ML
        truth = {(word, EOS): float(p) for word, p in zip(WORDS, p_MV[0], strict=True)}
        assert distance(found, truth) < 0.06
    assert (with_MV[0] - without_MV[0]).abs().max() > 0.3


def test_auto_keeps_the_length_with_the_best_score_per_word(tiny_model) -> None:
    model = tiny_model("mdc", seed=1)
    auto = generate(model, model.config, patches(model), "auto", lengths=[2, 3, 5]).tokens_ML
    values = []
    for length in (2, 3, 5):
        tokens_ML = generate(model, model.config, patches(model), length).tokens_ML
        values.append(
            score(model, model.config, patches(model), tokens_ML[:, None], "unmask").value_MK[:, 0] / (length - 1)
        )
    best = [(2, 3, 5)[i] for i in torch.stack(values).argmax(0).tolist()]
    assert (auto != PAD).sum(1).tolist() == best
    listed = generate(model, model.config, patches(model), best).tokens_ML
    assert torch.equal(auto, listed)


def test_pick_inverts_the_distribution_function() -> None:
    p_V = torch.tensor([0.1, 0.6, 0.0, 0.3])
    log_NV, u_N = p_V.log().expand(1000, -1), torch.arange(1000) / 1000

    def shares(temperature: float, top_p: float) -> Tensor:
        return torch.bincount(pick(log_NV, u_N, temperature, top_p), minlength=4) / 1000

    torch.testing.assert_close(shares(1.0, 1.0), p_V, atol=2e-3, rtol=0)
    torch.testing.assert_close(shares(1.0, 0.85), torch.tensor([0, 2 / 3, 0, 1 / 3]), atol=2e-3, rtol=0)
    torch.testing.assert_close(shares(0.5, 1.0), p_V**2 / (p_V**2).sum(), atol=2e-3, rtol=0)
    assert shares(0.0, 1.0).tolist() == shares(1.0, 1e-9).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}, {"steps": 0}, {"beams": 2}])
def test_options_out_of_range_are_refused(tiny_model, options: dict) -> None:
    model = tiny_model("mdc")
    with pytest.raises(UserError, match=next(iter(options))):
        generate(model, model.config, patches(model), 4, **options)


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        ("mdc", {"sampler": "greedy"}, "unknown sampler 'greedy'; one of: ancestral, autoregressive, confidence"),
        ("mdc", {"sampler": "autoregressive"}, "does not fit.*take 'confidence'"),
        ("cappa", {"sampler": "ancestral"}, "take 'autoregressive'"),
        ("cappa", {"template": [5, MASK, EOS]}, "only models that read masked captions"),
        ("cappa", {"steps": 3}, "only for samplers that unmask"),
        ("clip", {}, "writes none"),
        ("mdc", {"guidance": 2.0}, "set pretrain.image_drop above 0"),
        ("mdc", {"length": 7}, r"length 7 is outside 2\.\.6"),
        ("mdc", {"length": 1}, "length 1 is outside"),
        ("mdc", {"length": [3, 4]}, "2 lengths or templates for 3 images"),
        ("mdc", {"template": [5, MASK]}, "must end with the end token"),
    ],
)
def test_mistakes_are_named_with_their_fix(tiny_model, objective: str, options: dict, message: str) -> None:
    model = tiny_model(objective)
    with pytest.raises(UserError, match=message):
        generate(model, model.config, patches(model), **{"length": 4, **options})


def test_every_captioning_objective_has_a_sampler() -> None:
    names = ("mdc", "cmlm", "bert", "autoregressive", "cappa")
    assert {default_sampler(name) for name in names} <= set(SAMPLERS)
