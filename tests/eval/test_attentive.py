import numpy as np
import torch
from torch.nn import functional as F

from mdc.eval.attentive import AttentiveHead, attentive_probe
from mdc.eval.measures import accuracy
from mdc.eval.probe import Choice, fit_head

CPU = torch.device("cpu")


def needles(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight patches of noise, `[N, P, D]`; one of them, at a random place, is marked and holds the class."""
    random = np.random.default_rng(seed)
    labels = random.integers(4, size=rows)
    patches = random.normal(size=(rows, 8, 16)) * 2
    patches[:, :, 0] = 0
    place = random.integers(8, size=rows)
    marked = np.eye(16)[1 + labels] * 6
    marked[:, 0] = 6
    patches[np.arange(rows), place] = marked + 0.3 * random.normal(size=(rows, 16))
    return patches.astype(np.float16), labels


def probed(train: np.ndarray, labels: np.ndarray, test: np.ndarray, seed: int = 0):
    groups = [str(row) for row in range(len(labels))]
    return attentive_probe(train, labels, groups, test, 4, 25, 0.2, seed, CPU, learning_rates=[1e-3, 1e-2])


def test_it_finds_the_patch_that_the_mean_hides() -> None:
    (train, labels), (test, truth) = needles(1500, 1), needles(500, 2)
    found = probed(train, labels, test)
    means = [torch.from_numpy(each.astype(np.float32).mean(1)) for each in (train, test)]
    linear = fit_head(means[0], labels, means[1], 4, 20, Choice(0.03, 1e-2), 0)
    assert accuracy(found.predicted, truth) > 0.95
    assert accuracy(found.predicted, truth) > accuracy(linear.predicted, truth) + 0.1
    assert found.ranked.shape == (500, 4)
    assert found.choice.holdout == 300


def test_it_is_attention_with_keys_and_values() -> None:
    torch.manual_seed(0)
    head, patches_BPD = AttentiveHead(128, 5), torch.randn(3, 7, 128)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_BPD = F.layer_norm(patches_BPD, (128,)) * head.gain_D + head.offset_D
    key_BHPd, value_BHPd = (layer(x_BPD).unflatten(2, (2, 64)).transpose(1, 2) for layer in (head.keys, head.values))
    query_BH1d = head.query_Hd[None, :, None].expand(3, -1, -1, -1)
    expected_BC = head.classes(F.scaled_dot_product_attention(query_BH1d, key_BHPd, value_BHPd).flatten(1))
    torch.testing.assert_close(head(F.layer_norm(patches_BPD, (128,))), expected_BC, atol=1e-3, rtol=1e-4)


def test_labels_by_chance_are_not_learnt_and_seeds_repeat() -> None:
    train, _ = needles(400, 1)
    test, truth = needles(800, 2)
    labels = np.random.default_rng(0).integers(4, size=400)
    first, again = (probed(train, labels, test) for _ in range(2))
    np.testing.assert_array_equal(first.ranked, again.ranked)
    assert abs(accuracy(first.predicted, truth) - 0.25) < 0.08
