"""Row `neighbours`: queries a second among a million vectors, against exact search."""

import faiss
import numpy as np

from bench.frame import Result, in_turn, rates
from mdc.eval.index import CosineIndex

ROUNDS = 3
VECTORS, QUERIES, WIDTH, K = 1_000_000, 256, 512, 10
CLUSTERS, INNER = 20_000, 64
AT_ONCE = 50_000  # vectors


def clustered(count: int, seed: int = 0) -> np.ndarray:
    """Vectors as features of pictures lie: in clusters of unequal size, in few directions of many.

    20,000 clusters whose sizes fall as rank^-0.7, in 64 directions of 512; half the centres' spread within a cluster,
    and a little noise in all directions.
    """
    random = np.random.default_rng(seed)
    share = np.arange(1, CLUSTERS + 1) ** -0.7
    centres = random.standard_normal((CLUSTERS, INNER), dtype=np.float32)
    directions = np.linalg.qr(random.standard_normal((WIDTH, INNER)))[0].T.astype(np.float32)
    vectors = np.empty((count, WIDTH), dtype=np.float32)
    for start in range(0, count, AT_ONCE):
        rows = min(AT_ONCE, count - start)
        chosen = random.choice(CLUSTERS, rows, p=share / share.sum())
        inner = centres[chosen] + 0.5 * random.standard_normal((rows, INNER), dtype=np.float32)
        noise = 0.02 * random.standard_normal((rows, WIDTH), dtype=np.float32)
        vectors[start : start + rows] = inner @ directions + noise
    return vectors


def measure() -> list[Result]:
    vectors = clustered(VECTORS + QUERIES)
    queries, vectors = vectors[:QUERIES].copy(), vectors[QUERIES:]
    faiss.normalize_L2(queries)
    index = CosineIndex.build([str(number) for number in range(VECTORS)], vectors, "bench")
    flat = faiss.IndexFlatIP(WIDTH)
    faiss.normalize_L2(vectors)
    flat.add(vectors)
    del vectors
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = index.search(queries, K, "bench")[1].astype(np.int64)

    def theirs() -> None:
        found["theirs"] = flat.search(queries, K)[1]

    taken = in_turn({"ours": ours, "theirs": theirs}, ROUNDS)
    shared = [len(set(a) & set(b)) for a, b in zip(found["ours"], found["theirs"], strict=True)]
    recall = float(np.mean(shared)) / K
    assert recall >= 0.95, f"recall@{K} is {recall:.3f}"
    return [
        Result(
            "neighbours",
            f"the {K} nearest of {VECTORS:,} vectors of {WIDTH} numbers, {QUERIES} new queries at once",
            "FAISS `IndexFlatIP`",
            "queries/s",
            rates(QUERIES, taken["ours"]),
            rates(QUERIES, taken["theirs"]),
            aim=10.0,
            compared=f"{index.facts.probes} of {index.facts.lists} lists, recall@{K} {recall:.3f} against exact; "
            f"{CLUSTERS:,} clusters of unequal size in {INNER} directions (see the row's module)",
        )
    ]
