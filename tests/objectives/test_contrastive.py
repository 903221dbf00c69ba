import importlib.util
import math
import multiprocessing
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from mdc.model.two_tower import TwoTower
from mdc.objectives import OBJECTIVES, TextImage
from mdc.objectives.contrastive import clip_loss, siglip_loss

SCALE, BIAS = 7.0, -1.5
LOSSES = {"clip": clip_loss, "siglip": siglip_loss}


def open_clip_losses() -> ModuleType:
    """open_clip's module of losses by itself: the package around it takes seconds to import."""
    package = importlib.util.find_spec("open_clip")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("open_clip_loss", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def features(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 6, generator=generator)


def with_gradients(name: str, theirs: bool, images: Tensor, texts: Tensor, rank: int, world: int) -> list[Tensor]:
    """The mean loss over all pairs and its gradients, as DistributedDataParallel would leave them."""
    reference = open_clip_losses()
    leaves = [
        images.clone().requires_grad_(),
        texts.clone().requires_grad_(),
        torch.tensor(SCALE, requires_grad=True),
        torch.tensor(BIAS, requires_grad=True),
    ]
    image_BE, text_BE, scale, bias = leaves
    image_BE, text_BE = F.normalize(image_BE, dim=-1), F.normalize(text_BE, dim=-1)
    if theirs and name == "clip":
        clip = reference.ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
        loss = clip(image_BE, text_BE, scale)
    elif theirs:
        loss = reference.SigLipLoss(rank=rank, world_size=world)(image_BE, text_BE, scale, bias)
    else:
        loss = LOSSES[name](image_BE, text_BE, scale, bias) / len(images)
    loss.backward()
    found = [loss.detach(), *(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)]
    if world > 1:
        for tensor in (found[0], found[3], found[4]):  # of the shared weights, here scale and bias
            torch_dist.all_reduce(tensor)
            tensor /= world
    return found


def compare_on_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    images, texts = (x.chunk(world)[rank] for x in features())
    found = {
        (name, theirs): with_gradients(name, theirs, images, texts, rank, world)
        for name in LOSSES
        for theirs in (False, True)
    }
    torch.save(found, f"{folder}/{rank}.pt")
    torch_dist.destroy_process_group()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_open_clip(name: str) -> None:
    images, texts = features()
    ours, theirs = (with_gradients(name, side, images, texts, 0, 1) for side in (False, True))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_two_ranks_equal_open_clip_on_two_ranks_and_ours_on_one(tmp_path) -> None:
    multiprocessing.set_forkserver_preload(["mdc.objectives.contrastive"])  # imported once for both ranks
    mp.start_processes(compare_on_rank, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name in LOSSES:
        for rank in ranks:
            for mine, other in zip(rank[name, False], rank[name, True], strict=True):
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        alone = with_gradients(name, False, *features(), 0, 1)
        for i in (0, 3, 4):
            torch.testing.assert_close(ranks[0][name, False][i], alone[i], atol=1e-5, rtol=1e-5)
        for i in (1, 2):  # a rank's loss is divided by its own 4 pairs, the whole by 8
            both = torch.cat([rank[name, False][i] for rank in ranks]) / 2
            torch.testing.assert_close(both, alone[i], atol=1e-5, rtol=1e-5)


def test_the_scale_is_capped_and_can_come_down_again(tiny_model) -> None:
    model: TwoTower = tiny_model("clip", max_logit_scale=100.0).train()
    with torch.no_grad():
        model.log_scale.fill_(6.0)
    tokens_BL = torch.tensor([[5, 3, 0], [6, 7, 3]])
    OBJECTIVES["clip"].constrain(model)
    total, count = OBJECTIVES["clip"].loss(model, TextImage(torch.randn(2, 3, 16, 16), tokens_BL), torch.Generator())
    total.backward()
    assert count == 2
    assert float(model.log_scale.detach().exp()) == pytest.approx(100)
    assert model.log_scale.grad is not None
    assert model.log_scale.grad != 0


def test_the_towers_start_as_published(tiny_config) -> None:
    clip, siglip = (OBJECTIVES[name].build(tiny_config(name)) for name in ("clip", "siglip"))
    assert float(clip.log_scale.detach().exp()) == pytest.approx(1 / 0.07)
    assert clip.bias is None
    assert float(siglip.log_scale.detach().exp()) == pytest.approx(10)
    assert float(siglip.bias.detach()) == -10
    assert siglip.max_scale == math.inf


@pytest.mark.parametrize("name", LOSSES)
def test_text_features_do_not_change_with_padding(tiny_model, name: str) -> None:
    model = tiny_model(name)
    short, long = torch.tensor([[5, 6, 3]]), torch.tensor([[5, 6, 3, 0, 0]])
    last_B = torch.tensor([2])
    torch.testing.assert_close(model.text_features(short, last_B), model.text_features(long, last_B))
    torch.testing.assert_close(model.text_features(long, last_B).norm(), torch.tensor(1.0))


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_features_in_bfloat16_is_computed_in_float32(tiny_model, name: str) -> None:
    model = tiny_model(name).train()
    images_BCHW, tokens_BL = torch.randn(4, 3, 16, 16), torch.tensor([[5, 3, 0], [6, 7, 3], [7, 3, 0], [5, 6, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = OBJECTIVES[name].loss(model, TextImage(images_BCHW, tokens_BL), torch.Generator())
        features = model(images_BCHW, tokens_BL, torch.tensor([1, 2, 1, 2]))
        coarse = OBJECTIVES[name].pair_loss(*features)
    assert total == OBJECTIVES[name].pair_loss(*features)
    assert total.dtype == torch.float32
    assert total != coarse, "autocast would have multiplied in bfloat16"
