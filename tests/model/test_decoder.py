import pytest
import torch
from torch import Tensor

from mdc.model.captioner import Captioner
from mdc.model.decoder import Cache, Decoder, attention_mask

PAD = 0


def random_decoder(memory_width: int | None = 12) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(vocabulary=20, positions=8, width=16, depth=2, heads=2, memory_width=memory_width, never=(0, 4))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return decoder.eval()


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder()


@pytest.fixture
def patches_MPD() -> Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


def padded(rows: list[list[int]], length: int) -> Tensor:
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def decode(decoder: Decoder, tokens_BL: Tensor, patches_MPD: Tensor, causal: list[bool]) -> Tensor:
    mask, is_causal = attention_mask(tokens_BL != PAD, torch.tensor(causal))
    return decoder(tokens_BL, decoder.keys(patches_MPD), mask, is_causal)


def test_patches_give_what_their_keys_give(decoder: Decoder, patches_MPD: Tensor) -> None:
    tokens_BL = torch.tensor([[5, 6, 7], [9, 8, 7]])
    assert torch.equal(decoder(tokens_BL, patches_MPD), decoder(tokens_BL, decoder.keys(patches_MPD)))


@pytest.mark.parametrize("causal", [[True, True], [True, False]])
def test_a_causal_row_does_not_see_later_tokens(decoder: Decoder, patches_MPD: Tensor, causal: list[bool]) -> None:
    tokens_BL = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    changed_BL = tokens_BL.clone()
    changed_BL[:, 3] = 12
    before, after = (decode(decoder, t, patches_MPD, causal) for t in (tokens_BL, changed_BL))
    assert torch.equal(before[0, :3], after[0, :3])
    assert not torch.allclose(before[0, 3], after[0, 3])
    assert torch.allclose(before[1, :3], after[1, :3]) == causal[1]


@pytest.mark.parametrize("causal", [[False, False], [True, True], [True, False]])
def test_hidden_states_do_not_change_with_padding(decoder: Decoder, patches_MPD: Tensor, causal: list[bool]) -> None:
    rows = [[5, 6, 7], [9, 8, 7, 6, 5]]
    short_BLD = decode(decoder, padded(rows, 5), patches_MPD, causal)
    long_BLD = decode(decoder, padded(rows, 8), patches_MPD, causal)
    for b, row in enumerate(rows):
        alone_1LD = decode(decoder, torch.tensor([row]), patches_MPD[b : b + 1], causal[b : b + 1])
        torch.testing.assert_close(short_BLD[b, : len(row)], alone_1LD[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(long_BLD[b, : len(row)], alone_1LD[0], atol=1e-5, rtol=1e-5)


def test_a_mask_is_made_only_where_it_is_needed() -> None:
    full, part = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    neither, both = torch.tensor([False, False]), torch.tensor([True, True])
    assert attention_mask(full, neither) == (None, False)
    assert attention_mask(part, both) == (None, True)
    mask, is_causal = attention_mask(part, neither)
    assert mask is not None
    assert torch.equal(mask[:, 0, 0], part)
    assert not is_causal


def test_a_row_of_padding_alone_stays_finite(decoder: Decoder, patches_MPD: Tensor) -> None:
    hidden_BLD = decode(decoder, padded([[], [5, 6]], 4), patches_MPD, [False, False])
    assert hidden_BLD.isfinite().all()


def test_many_captions_of_an_image_share_its_keys(decoder: Decoder, patches_MPD: Tensor) -> None:
    tokens_BL = torch.randint(5, 20, (6, 4), generator=torch.Generator().manual_seed(2))  # 3 captions of 2 images
    together = decode(decoder, tokens_BL, patches_MPD, [False] * 6)
    copied = decode(decoder, tokens_BL, patches_MPD.repeat_interleave(3, 0), [False] * 6)
    torch.testing.assert_close(together, copied, atol=1e-5, rtol=1e-5)
    swapped = decode(decoder, tokens_BL, patches_MPD.flip(0), [False] * 6)
    assert not torch.allclose(together, swapped, atol=1e-3)


def test_the_cache_gives_what_one_causal_pass_gives(decoder: Decoder, patches_MPD: Tensor) -> None:
    tokens_BL = torch.randint(5, 20, (4, 6), generator=torch.Generator().manual_seed(3))
    whole_BLD = decode(decoder, tokens_BL, patches_MPD, [True] * 4)
    cache, keys = Cache(), decoder.keys(patches_MPD)
    steps = [decoder(tokens_BL[:, i : i + 1], keys, cache=cache) for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole_BLD, atol=1e-5, rtol=1e-5)
    order_B = torch.tensor([1, 1, 3, 2])  # within an image
    cache = Cache()
    decoder(tokens_BL[:, :1], keys, cache=cache)
    cache.reorder(order_B)
    second = decoder(tokens_BL[order_B, 1:2], keys, cache=cache)
    torch.testing.assert_close(second[:, 0], whole_BLD[order_B, 1], atol=1e-5, rtol=1e-5)


def test_tokens_that_no_caption_contains_have_no_probability(decoder: Decoder) -> None:
    p_NV = decoder.logits(torch.randn(3, 16)).softmax(1)
    assert (p_NV[:, [0, 4]] == 0).all()
    torch.testing.assert_close(p_NV.sum(1), torch.ones(3))


def test_projections_have_no_bias_and_embeddings_are_tied(decoder: Decoder) -> None:
    names = dict(decoder.named_parameters())
    assert all("norm" in name for name in names if name.endswith("bias"))
    assert [name for name, p in names.items() if p.shape == (20, 16)] == ["embed.weight"]


def test_one_null_patch_stands_for_an_image_without_content(tiny_model) -> None:
    model: Captioner = tiny_model("mdc", image_drop=0.1)
    images_BCHW, tokens_BL = torch.randn(2, 3, 16, 16), torch.tensor([[5, 4, 3], [4, 6, 3]])
    positions_N = torch.arange(6)
    dropped_NV = model(images_BCHW, tokens_BL, positions_N, dropped_B=torch.tensor([True, True]))
    null_NV = model.decoder.logits(model.decoder(tokens_BL, model.null_keys())).flatten(0, 1)
    torch.testing.assert_close(dropped_NV.softmax(1), null_NV.softmax(1), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(images_BCHW, tokens_BL, positions_N).softmax(1), null_NV.softmax(1), atol=1e-3)
    assert tiny_model("mdc").null_keys() is None
