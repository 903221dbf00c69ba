"""The batches of a step are the same for any number of ranks, micro-batches and loader processes."""

import io
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mdc.data.columns import share_key
from mdc.data.loader import Batch, ShardDataset, TrainLoader, centre_square, eval_batches, within_share
from mdc.errors import UserError

PAD = 0


@pytest.fixture
def folder(shards: Callable[..., Path]) -> Path:
    return shards()


def joined(batches: list[Batch]) -> dict[int, tuple[list[str], torch.Tensor, list[list[int]]]]:
    """Uids, images and unpadded tokens of each step's global batch, its parts put in the order of their rows."""
    steps: dict[int, list[Batch]] = {}
    for batch in batches:
        steps.setdefault(batch.step, []).append(batch)
    result = {}
    for step, parts in steps.items():
        parts.sort(key=lambda batch: batch.first)
        assert [part.first for part in parts] == list(np.cumsum([0] + [len(part.uids) for part in parts[:-1]]))
        assert {part.total for part in parts} == {sum(len(part.uids) for part in parts)}
        tokens = [
            row[:length].tolist()
            for part in parts
            for row, length in zip(part.tokens_BL, part.lengths_B.tolist(), strict=True)
        ]
        uids = [uid for part in parts for uid in part.uids]
        result[step] = (uids, torch.cat([part.images_BCHW for part in parts]), tokens)
    return result


def assert_same(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for step in one:
        assert one[step][0] == two[step][0]
        assert torch.equal(one[step][1], two[step][1])
        assert one[step][2] == two[step][2]


@pytest.mark.parametrize(
    ("world", "accumulate", "workers", "cache"), [(1, 1, 0, 0), (2, 1, 0, 1), (1, 4, 2, 0), (2, 2, 1, 0)]
)
def test_batches_do_not_depend_on_the_layout(
    folder: Path, world: int, accumulate: int, workers: int, cache: int
) -> None:
    steps = range(3, 9)  # 8 x 9 rows pass the end of an epoch of fewer than 45
    whole = list(TrainLoader(ShardDataset(folder, "train"), 8, 7, steps, PAD))
    assert [batch.step for batch in whole] == list(steps)
    dataset = ShardDataset(folder, "train", cache_bytes=cache * 2**20)
    assert dataset.is_cached == bool(cache)
    parts = []
    for rank in range(world):
        loader = TrainLoader(dataset, 8, 7, steps, PAD, rank, world, accumulate, workers)
        mine = list(loader)
        assert len(mine) == len(loader) == len(steps) * accumulate
        assert [(batch.step, batch.first) for batch in mine] == sorted((batch.step, batch.first) for batch in mine)
        parts += mine
    assert_same(joined(whole), joined(parts))


def test_a_later_start_continues_and_another_seed_does_not(folder: Path) -> None:
    dataset = ShardDataset(folder, "train")
    whole = joined(list(TrainLoader(dataset, 8, 7, range(10), PAD)))
    assert_same(
        {step: whole[step] for step in range(6, 10)}, joined(list(TrainLoader(dataset, 8, 7, range(6, 10), PAD)))
    )
    other = joined(list(TrainLoader(dataset, 8, 8, range(10), PAD)))
    assert other[0][0] != whole[0][0]


def test_every_epoch_holds_every_sample_once_in_its_own_order(folder: Path) -> None:
    dataset = ShardDataset(folder, "train")
    count = len(dataset)
    uids = [uid for batch in TrainLoader(dataset, count, 7, range(3), PAD) for uid in batch.uids]
    epochs = [uids[count * e : count * (e + 1)] for e in range(3)]
    assert all(sorted(epoch) == sorted(dataset.uids) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    larger = TrainLoader(dataset, 3 * count, 7, range(1), PAD)
    assert next(iter(larger)).uids == uids


def test_rows_are_those_of_the_shards(folder: Path) -> None:
    dataset = ShardDataset(folder, "train")
    rows = {row["uid"]: row for row in pq.read_table(folder / "samples.parquet").to_pylist()}
    for batch in TrainLoader(dataset, 6, 0, range(4), PAD):
        assert batch.images_BCHW.dtype == torch.uint8
        assert batch.images_BCHW.shape == (6, 3, 16, 16)
        assert batch.tokens_BL.dtype == torch.int64
        assert batch.tokens_BL.shape[1] == batch.lengths_B.max()
        for image, tokens, length, uid in zip(
            batch.images_BCHW, batch.tokens_BL, batch.lengths_B.tolist(), batch.uids, strict=True
        ):
            row = rows[uid]
            assert tokens[:length].tolist() == row["tokens"]
            assert (tokens[length:] == PAD).all()
            data = (folder / row["shard"]).read_bytes()[row["image_offset"] :][: row["image_bytes"]]
            expected = np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
            assert np.array_equal(image.numpy(), expected)


def test_evaluation_sees_every_sample_once_in_order(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        dataset = ShardDataset(folder, split)
        for size in (1, 4, 100):
            batches = list(eval_batches(dataset, size, PAD))
            assert [uid for batch in batches for uid in batch.uids] == dataset.uids
            assert [batch.first for batch in batches] == list(range(0, len(dataset), size))
            assert {batch.total for batch in batches} == {len(dataset)}


def test_single_samples(folder: Path) -> None:
    dataset = ShardDataset(folder, "test", cache_bytes=0)
    image, tokens, uid = dataset[1]
    assert image.shape == (3, 16, 16)
    rows = {row["uid"]: row for row in pq.read_table(folder / "samples.parquet").to_pylist()}
    assert tokens == rows[uid]["tokens"]
    assert uid == dataset.uids[1]


def test_wide_pictures_lose_their_sides() -> None:
    pixels = np.arange(2 * 6 * 3).reshape(2, 6, 3)
    assert np.array_equal(centre_square(pixels), pixels[:, 2:4])
    assert np.array_equal(centre_square(pixels.transpose(1, 0, 2)), pixels.transpose(1, 0, 2)[2:4])


def test_pickled_loaders_go_on(folder: Path) -> None:
    loader = TrainLoader(ShardDataset(folder, "train"), 8, 7, range(2), PAD)
    assert pickle.loads(pickle.dumps(loader)).batch(1).uids == loader.batch(1).uids


def test_mistakes(folder: Path) -> None:
    dataset = ShardDataset(folder, "train")
    with pytest.raises(UserError, match="batch_size 8 does not divide over 3 ranks x 1"):
        TrainLoader(dataset, 8, 0, range(1), PAD, rank=0, world=3)
    with pytest.raises(UserError, match=r"unknown split 'tets'.*'test'"):
        ShardDataset(folder, "tets")


def test_smaller_shares_lie_within_larger_ones_and_keep_the_order(folder: Path) -> None:
    whole = ShardDataset(folder, "train").uids
    parts = [ShardDataset(folder, "train", share=share) for share in (0.1, 0.3, 0.9, 1.0)]
    assert [len(part) for part in parts] == [round(share * len(whole)) for share in (0.1, 0.3, 0.9, 1.0)]
    for smaller, larger in pairwise(parts):
        assert set(smaller.uids) < set(larger.uids)
    for part in parts:
        assert part.uids == [uid for uid in whole if uid in set(part.uids)]
    few = parts[1]
    everything = ShardDataset(folder, "train")
    assert torch.equal(few.images([2])[0], everything.images([whole.index(few.uids[2])])[0])
    assert few[2][1] == everything[whole.index(few.uids[2])][1]
    # a hash of the uid alone: whatever else there is, of two samples the same one comes first
    keys = np.array([share_key(uid) for uid in whole])
    assert within_share(keys[::-1], 0.3).tolist() == within_share(keys, 0.3)[::-1].tolist()
    assert within_share(keys, 1e-9).sum() == 1
