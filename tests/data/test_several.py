"""Several captions of one picture: kept together, filtered one by one, and one of them drawn per visit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mdc.config import CaptionParams, ShardParams
from mdc.data.captions import prepare_captions
from mdc.data.loader import ShardDataset, TrainLoader, eval_batches
from mdc.data.packing import write_shards
from mdc.errors import UserError
from mdc.files import read_json

PAIRS = 60
WRITTEN = {"re": "a red dog", "org": "my dog"}


def captions_of(number: int) -> list[dict[str, str | None]]:
    """A synthetic caption, the page's own, and one more of the page for every second picture."""
    given = [("re", f"a red dog {number % 7}"), ("org", f"dog {number % 5}"), ("org", f"pet {number % 5}")]
    if number == 0:
        given[0] = ("re", " ".join(["dog"] * 40))  # too long: the next one leads
    if number == 1:
        given = [("re", None), ("org", " ")]
    return [{"source": source, "text": text} for source, text in given[: 3 if number % 2 == 0 else 2]]


@pytest.fixture
def prepared(tmp_path: Path, downloaded: Callable[..., Path]) -> Path:
    lists = [captions_of(number) for number in range(PAIRS)]
    firsts: list[Any] = [given[0]["text"] for given in lists]
    source = downloaded(captions=firsts)
    for part in source.glob("*.parquet"):
        rows = pd.read_parquet(part)
        rows["captions"] = [lists[int(uid[1:])] for uid in rows["uid"]]
        rows.to_parquet(part, index=False)
    prepare_captions(CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2), source, tmp_path / "captions")
    write_shards(ShardParams(samples_per_shard=8), source, tmp_path / "captions", tmp_path / "shards")
    return tmp_path


def test_each_caption_is_kept_or_counted(prepared: Path) -> None:
    rows = pd.concat(map(pd.read_parquet, (prepared / "captions").glob("*.parquet"))).set_index("uid")
    assert (rows.loc["u000", "source"], rows.loc["u000", "caption"]) == ("org", "dog 0")
    assert [other["caption"] for other in rows.loc["u000", "others"]] == ["pet 0"]
    assert rows.loc["u001", "reason"] == "missing"
    assert [(other["source"], other["caption"]) for other in rows.loc["u004", "others"]] == [
        ("org", "dog 4"),
        ("org", "pet 4"),
    ]
    counts = read_json(prepared / "captions" / "manifest.json")["counts"]
    assert counts["reasons"] == {"kept": PAIRS - 1, "missing": 1}
    assert counts["captions"] == {"kept": 150 - 3, "missing": 2, "too_long": 1}


def test_shards_hold_all_of_them_with_their_tokens(prepared: Path) -> None:
    rows = pd.read_parquet(prepared / "shards" / "samples.parquet").set_index("uid")
    dataset = ShardDataset(prepared / "shards", "train")
    assert set(dataset.sources) == {"re", "org"}
    found = 0
    for index, uid in enumerate(dataset.uids):
        row = rows.loc[uid]
        every = [list(row["tokens"]), *(list(other["tokens"]) for other in row["others"])]
        seen = {
            tuple(dataset.tokens([index], 0, dataset.drawn([index], _visit(visit), 0, {}))[0][0].tolist())
            for visit in range(40)
        }
        assert seen == set(map(tuple, every))
        found += len(every)
    assert found > len(dataset) * 2
    for batch in eval_batches(dataset, 8, 0):  # evaluation reads the first
        for tokens, length, uid in zip(batch.tokens_BL, batch.lengths_B.tolist(), batch.uids, strict=True):
            assert tokens[:length].tolist() == list(rows.loc[uid, "tokens"])


def _visit(number: int) -> Any:
    import numpy as np

    return np.array([number])


def sources_seen(dataset: ShardDataset, mix: dict[str, float], epochs: int = 40) -> Counter[str]:
    """Of the captions shown in training, for pictures that have both sources."""
    loader = TrainLoader(dataset, len(dataset), 3, range(epochs), 0, caption_mix=mix)
    rows = pd.read_parquet(dataset.folder / "samples.parquet").set_index("uid")
    texts = {uid: {tuple(row["tokens"]): row["source"]} for uid, row in rows.iterrows()}
    for uid, row in rows.iterrows():
        texts[uid] |= {tuple(other["tokens"]): other["source"] for other in row["others"]}
    seen: Counter[str] = Counter()
    for batch in loader:
        for tokens, length, uid in zip(batch.tokens_BL, batch.lengths_B.tolist(), batch.uids, strict=True):
            if len(set(texts[uid].values())) == 2:
                seen[texts[uid][tuple(tokens[:length].tolist())]] += 1
    return seen


def test_sources_are_mixed_as_asked(prepared: Path) -> None:
    dataset = ShardDataset(prepared / "shards", "train")
    for mix, expected in (({"re": 0.8, "org": 0.2}, 0.8), ({"re": 1.0}, 1.0), ({"org": 3.0, "re": 0.0}, 0.0)):
        seen = sources_seen(dataset, mix)
        assert abs(seen["re"] / seen.total() - expected) < 0.05
    assert 0.3 < sources_seen(dataset, {})["re"] / sources_seen(dataset, {}).total() < 0.5  # of two or three
    with pytest.raises(UserError, match=r"pretrain\.caption_mix names \['ree'\]; the captions of .* come from"):
        TrainLoader(dataset, 8, 0, range(1), 0, caption_mix={"ree": 1.0})


def test_what_is_drawn_depends_on_seed_visit_and_uid_alone(prepared: Path) -> None:
    dataset = ShardDataset(prepared / "shards", "train")
    size = len(dataset)

    def shown(seed: int, steps: range, world: int = 1, workers: int = 0) -> list[tuple[str, list[int]]]:
        pairs = []
        for rank in range(world):
            loader = TrainLoader(dataset, size - size % 4, seed, steps, 0, rank=rank, world=world, workers=workers)
            for batch in loader:
                for tokens, length, uid in zip(batch.tokens_BL, batch.lengths_B.tolist(), batch.uids, strict=True):
                    pairs.append((f"{batch.step} {uid}", tokens[:length].tolist()))
        return sorted(pairs)

    whole = shown(0, range(6))
    assert whole == shown(0, range(6), world=2) == sorted(shown(0, range(2)) + shown(0, range(2, 6)))
    assert [tokens for _, tokens in whole] != [tokens for _, tokens in shown(1, range(6))]
