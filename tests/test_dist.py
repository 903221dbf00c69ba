"""Reductions and gathers: the identity with one process, the truth with two."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from mdc import dist
from mdc.errors import UserError

TWO_RANKS = """
import json, os, sys, time
import torch
from mdc import dist

with dist.process_group(torch.device("cpu"), timeout_s=60):
    rank = dist.rank()
    x = torch.arange(3.0) + 10 * rank
    x.requires_grad_()
    gathered = dist.all_gather(x[:, None])
    weights = torch.arange(6.0)[:, None]
    (gathered * weights).sum().backward()
    kept = torch.ones(2, requires_grad=True)
    total = dist.all_reduce_sum(kept * (rank + 1))
    with dist.alone():
        lonely = [dist.world_size(), dist.rank(), dist.is_main(), dist.all_reduce_sum(torch.ones(1)).item()]
    dist.barrier()
    answer = {
        "rank": rank, "world": dist.world_size(), "main": dist.is_main(), "local": dist.local_rank(),
        "gathered": gathered.flatten().tolist(), "grad": x.grad.tolist(),
        "sum": total.tolist(), "sum_has_grad": total.requires_grad,
        "max": dist.all_reduce_max([rank * 7, -rank]), "objects": dist.gather_objects({"rank": rank}), "alone": lonely,
    }
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(answer, file)
assert dist.world_size() == 1
"""


def test_one_process_is_the_identity() -> None:
    x = torch.arange(3.0, requires_grad=True)
    assert (dist.rank(), dist.world_size(), dist.is_main(), dist.is_initialized()) == (0, 1, True, False)
    assert dist.all_reduce_sum(x) is x
    assert dist.all_gather(x) is x
    assert dist.all_reduce_max([4, -1]) == [4, -1]
    assert dist.gather_objects("a") == ["a"]
    dist.barrier()
    with dist.process_group(torch.device("cpu"), timeout_s=1):
        assert dist.world_size() == 1


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two gloo ranks got."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranks.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(folder / "ranks.py"), str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_know_themselves(answers: list[dict[str, Any]]) -> None:
    assert [(a["rank"], a["world"], a["main"], a["local"]) for a in answers] == [(0, 2, True, 0), (1, 2, False, 1)]


def test_a_gather_is_in_rank_order_on_every_rank(answers: list[dict[str, Any]]) -> None:
    assert all(a["gathered"] == [0, 1, 2, 10, 11, 12] for a in answers)


def test_a_gather_has_gradient_to_every_ranks_part(answers: list[dict[str, Any]]) -> None:
    """Each of the two ranks uses every row, so the gradient of a row is the sum of both uses."""
    assert [a["grad"] for a in answers] == [[0, 2, 4], [6, 8, 10]]


def test_sums_maxima_and_objects_are_of_all_ranks(answers: list[dict[str, Any]]) -> None:
    for a in answers:
        assert (a["sum"], a["sum_has_grad"]) == ([3, 3], False)
        assert a["max"] == [7, 0]
        assert a["objects"] == [{"rank": 0}, {"rank": 1}]


def test_a_rank_may_stand_alone_for_a_while(answers: list[dict[str, Any]]) -> None:
    assert all(a["alone"] == [1, 0, True, 1.0] for a in answers)


def test_devices_by_setting() -> None:
    assert dist.pick_device("cpu") == torch.device("cpu")
    if torch.cuda.is_available():
        assert dist.pick_device("auto").type == "cuda"
    else:
        assert dist.pick_device("auto") == torch.device("cpu")
        with pytest.raises(UserError, match="shows no GPU"):
            dist.pick_device("cuda")
