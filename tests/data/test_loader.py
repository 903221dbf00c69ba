"""The batches of a step are the same for any number of ranks, micro-batches and loader processes."""

import io
import json
import os
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mdc.data import loader
from mdc.data.columns import share_key
from mdc.data.loader import (
    Batch,
    EpochOrder,
    ShardDataset,
    TrainLoader,
    block_starts,
    centre_square,
    eval_batches,
    on_device,
    within_share,
)
from mdc.draws import derive_seed
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
        own = TrainLoader(dataset, 8, 7, steps, PAD, rank, world, accumulate, workers)
        mine = list(own)
        assert len(mine) == len(own) == len(steps) * accumulate
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
    batches = TrainLoader(ShardDataset(folder, "train"), 8, 7, range(2), PAD)
    assert pickle.loads(pickle.dumps(batches)).batch(1).uids == batches.batch(1).uids


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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of a shard in this process."""
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    return sizes


def test_a_block_is_one_read_and_nothing_else(folder: Path, reads: list[int]) -> None:
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    rows = pq.read_table(folder / "samples.parquet").to_pandas().set_index("uid")
    reads.clear()
    order = EpochOrder(dataset.shard_bounds, 4, 7, 0)
    places = np.arange(len(dataset))
    assert sorted(order.samples(places).tolist()) == places.tolist()
    batch = dataset.batch(order.samples(places), PAD, 0, len(places), 0)
    of_batch = rows.loc[batch.uids]
    ends = of_batch["image_offset"] + of_batch["image_bytes"]
    follows = (of_batch["shard"].shift() == of_batch["shard"]) & (of_batch["json_offset"] > of_batch["image_offset"])
    follows &= of_batch["image_offset"] > ends.shift()
    assert len(reads) == (~follows).sum()  # blocks that happen to follow one another are one read too
    shards = -(-len(dataset) // 8)
    assert len(reads) <= shards * 3  # eight samples a shard, in at most three blocks of up to four
    between = 2 * 512 + of_batch["json_bytes"] + 2 * 512  # headers, the caption, and the filling up of both to 512
    assert sum(reads) <= of_batch["image_bytes"].sum() + between.sum()


@pytest.mark.parametrize(("world", "accumulate", "workers"), [(1, 4, 0), (2, 1, 1), (4, 1, 0), (2, 2, 4)])
def test_blocks_are_the_same_for_any_layout(folder: Path, world: int, accumulate: int, workers: int) -> None:
    steps = range(3, 9)
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    whole = list(TrainLoader(dataset, 8, 7, steps, PAD, block_samples=3))
    parts = [
        batch
        for rank in range(world)
        for batch in TrainLoader(dataset, 8, 7, steps, PAD, rank, world, accumulate, workers, block_samples=3)
    ]
    assert_same(joined(whole), joined(parts))
    shuffled = list(TrainLoader(dataset, 8, 7, steps, PAD))
    assert [batch.uids for batch in shuffled] != [batch.uids for batch in whole]


def blocks_of(dataset: ShardDataset, size: int, seed: int, positions: np.ndarray) -> int:
    """How many blocks these places of the endless line touch."""
    epochs, places = np.divmod(positions, len(dataset))
    ends = {epoch: EpochOrder(dataset.shard_bounds, size, seed, epoch)._ends_K for epoch in set(epochs.tolist())}
    return len({(e, int(np.searchsorted(ends[e], p, "right"))) for e, p in zip(epochs.tolist(), places, strict=True)})


def test_parts_of_a_block_are_one_read_each(folder: Path, reads: list[int]) -> None:
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    for size in (2, 4, 8):
        for rank in range(8 // size):
            batches = TrainLoader(dataset, 8, 7, range(4), PAD, rank, 8 // size, block_samples=8)
            for number in range(len(batches)):
                places = 8 * number + rank * size + np.arange(size)
                blocks = blocks_of(dataset, 8, 7, places)
                reads.clear()
                batches.batch(number)
                assert len(reads) <= blocks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_every_block_lies_in_one_shard_and_every_sample_in_one_block(size: int) -> None:
    bounds = np.array([0, 7, 7, 8, 30, 31, 31])
    seen = set()
    for epoch in range(20):
        generator = np.random.Generator(np.random.PCG64(epoch))
        starts = block_starts(bounds, size, generator)
        lengths = np.diff(starts, append=bounds[-1])
        assert starts[0] == 0
        assert (lengths > 0).all()
        assert lengths.max() <= size
        assert set(bounds[:-1][np.diff(bounds) > 0]) <= set(starts)  # none reaches over a shard's end
        assert len(starts) <= sum(np.ceil(np.diff(bounds) / size) + 1)
        seen.add(tuple(starts))
        order = EpochOrder(bounds, size, 1, epoch).samples(np.arange(31))
        assert sorted(order.tolist()) == list(range(31))
    assert size == 1 or len(seen) > 1  # the cuts are others in every epoch


def test_blocks_of_one_are_a_full_shuffle() -> None:
    for epoch in range(3):
        generator = torch.Generator().manual_seed(derive_seed(5, "epoch", epoch))
        expected = torch.randperm(31, generator=generator).tolist()
        assert EpochOrder(np.array([0, 8, 16, 31]), 1, 5, epoch).samples(np.arange(31)).tolist() == expected


def test_a_share_reads_over_small_gaps_and_not_over_large_ones(
    folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShardDataset(folder, "train", cache_bytes=0, share=0.5)
    whole = ShardDataset(folder, "train")
    expected = whole.images([whole.uids.index(uid) for uid in dataset.uids])
    places = range(len(dataset))
    reads.clear()
    assert torch.equal(dataset.images(places), expected)
    few = len(reads)
    assert few == sum(np.diff(dataset.shard_bounds) > 0)
    reads.clear()
    monkeypatch.setattr(loader, "READ_OVER", 3000)  # a caption, but no sample
    assert torch.equal(dataset.images(places), expected)
    assert len(reads) > few


def test_batches_say_how_long_they_took(folder: Path) -> None:
    for workers in (0, 1):
        for batch in TrainLoader(ShardDataset(folder, "train", cache_bytes=0), 8, 7, range(2), PAD, workers=workers):
            assert batch.read_s > 0
            assert batch.decode_s > 0


def test_a_cpu_gets_the_batches_as_they_are(folder: Path) -> None:
    batches = list(TrainLoader(ShardDataset(folder, "train"), 8, 7, range(3), PAD))
    moved = list(on_device(iter(batches), torch.device("cpu")))
    assert [batch.step for batch in moved] == [0, 1, 2]
    assert all(one.images_BCHW is other.images_BCHW for one, other in zip(moved, batches, strict=True))


def test_evaluation_is_the_same_with_any_number_of_workers(folder: Path) -> None:
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    expected = list(eval_batches(dataset, 5, PAD))
    for workers in (1, 4):
        found = list(eval_batches(dataset, 5, PAD, workers))
        assert [batch.uids for batch in found] == [batch.uids for batch in expected]
        assert all(torch.equal(a.images_BCHW, b.images_BCHW) for a, b in zip(found, expected, strict=True))


def test_fewer_samples_than_ranks_and_empty_splits_are_refused(folder: Path) -> None:
    dataset = ShardDataset(folder, "train")
    few = len(dataset)
    assert len(list(TrainLoader(dataset, few, 0, range(2), PAD, few - 1, few))) == 2
    with pytest.raises(UserError, match=rf"'train' has {few} samples for {few + 1} ranks.*fewer ranks"):
        TrainLoader(dataset, few + 1, 0, range(1), PAD, 0, few + 1)
    index = json.loads((folder / "index.json").read_text())
    index["splits"]["test"] = []
    (folder / "index.json").write_text(json.dumps(index))
    empty = ShardDataset(folder, "test")
    assert (len(empty), empty.longest, empty.uids) == (0, 0, [])
    assert list(eval_batches(empty, 4, PAD)) == []
    with pytest.raises(UserError, match="'test' has 0 samples for 1 ranks"):
        TrainLoader(empty, 1, 0, range(1), PAD)


def test_a_shard_that_is_damaged_while_it_is_read_is_an_error(folder: Path) -> None:
    name = json.loads((folder / "index.json").read_text())["splits"]["train"][0]["file"]
    whole = (folder / name).read_bytes()
    rows = pq.read_table(folder / "samples.parquet").to_pandas()
    last = rows[rows["shard"] == name].iloc[-1]
    damaged = bytearray(whole)
    damaged[last["image_offset"] : last["image_offset"] + 40] = bytes(40)
    for data, message in (
        (b"", f"{name} ends at byte"),
        (whole[: last["image_offset"] + 9], f"{name} ends at byte {last['image_offset'] + 9}"),
        (bytes(damaged), f"the picture of '{last['uid']}' in .* is damaged"),
    ):
        (folder / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            list(eval_batches(ShardDataset(folder, "train", cache_bytes=0), 8, PAD))
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        list(eval_batches(ShardDataset(folder, "train", cache_bytes=0), 8, PAD))


def test_columns_that_are_cut_off_or_missing_are_an_error(folder: Path) -> None:
    uids, offsets = folder / "columns" / "uid.uint8", folder / "columns" / "image_offset.int64"
    uids.write_bytes(uids.read_bytes()[:-1])
    with pytest.raises(UserError, match="do not fit together"):
        ShardDataset(folder, "train")
    offsets.write_bytes(offsets.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"image_offset\.int64 is cut off"):
        ShardDataset(folder, "train")
    offsets.unlink()
    with pytest.raises(UserError, match=r"image_offset\.int64 is missing.*mdc stage shard"):
        ShardDataset(folder, "train")


@pytest.mark.parametrize("subsampling", [0, 2])
def test_pictures_decode_to_what_pillow_makes_of_them(folder: Path, subsampling: int) -> None:
    """Of any content and shape; wide ones lose their sides."""
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    generator = np.random.Generator(np.random.PCG64(0))
    for height, width in ((40, 40), (40, 61), (57, 40)):
        noise = Image.fromarray(generator.integers(0, 255, (9, 7, 3), np.uint8)).resize((width, height))
        file = io.BytesIO()
        noise.save(file, "JPEG", quality=90, subsampling=subsampling)
        with Image.open(file) as image:
            expected = centre_square(np.asarray(image)).transpose(2, 0, 1)
        found = dataset._decoded([memoryview(file.getvalue())] * 2, ["a", "b"])
        assert np.array_equal(found[1].numpy(), expected)
