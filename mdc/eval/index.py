"""Nearest neighbours by cosine: FAISS behind checks, with uids for ids, and the facts that a query must agree with.

Few vectors are searched exactly. From `FLAT_BELOW` on they lie in inverted lists (IVF), of which a query visits as many
as recall@10 takes; unlike a graph (HNSW), lists let vectors go again. Where FAISS sees GPUs, they search.

On disk a set of vectors, uids, index and facts is one version in a folder of its own, and a small file names the one
that holds: readers see the old set or the new one, whole, while it is replaced.
"""

import math
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mdc.errors import UserError
from mdc.files import damage, fingerprint, read_json, sha256, whole_folder, write_json, write_manifest

FLAT_BELOW = 20_000  # vectors; below it exact search is quick enough and lists would be small
LISTS_PER_ROOT = 4  # inverted lists: 4 sqrt(n), the lower end of what FAISS's guidelines suggest
POINTS_PER_LIST = 39  # the fewest training points per list that FAISS's k-means asks for
TRAINED_PER_LIST = 40  # points per list that k-means sees, at most
ROUNDS = 10  # of k-means
EXACT_AT_ONCE = 2**17  # vectors
GROWTH = 2.0  # times as many vectors as the lists were made for: then they are made anew
PROBE_QUERIES = 256  # queries on which the visited lists are chosen and recall is measured
WANTED_RECALL = 0.97  # of those queries, for which more lists are visited: 0.95 with a margin for other queries
READ_UP_TO = 2**30  # bytes whose checksums are compared when a set is opened; of larger ones the sizes are

CURRENT, VECTORS, IDS, INDEX, FACTS = "current.json", "vectors.npy", "ids.parquet", "index.faiss", "facts.json"

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]
Uids = NDArray[np.object_]


@dataclass(frozen=True)
class IndexFacts:
    """What a query must agree with. model: fingerprint of the checkpoint whose features these are."""

    dimension: int
    count: int
    metric: str
    model: str
    lists: int  # 0 = exact search
    probes: int  # lists visited per query
    made_for: int  # vectors when the lists were made
    recall_at_10: float  # against exact search, of vectors of the set among the others


def normalised(vectors: np.ndarray, what: str = "vectors") -> Vectors:
    """`[N, D]` of any float type or layout as float32 rows of length 1, contiguous.

    Raises UserError for another shape, a non-finite row, or a row of zeros, which has no direction.
    """
    vectors = np.asarray(vectors)
    if vectors.ndim != 2:
        raise UserError(f"{what} must have shape [rows, dimension], got {list(vectors.shape)}; give one row per item")
    if not np.issubdtype(vectors.dtype, np.number) or np.issubdtype(vectors.dtype, np.complexfloating):
        raise UserError(f"{what} must be real numbers, got {vectors.dtype}; convert them to float32")
    rows = vectors.astype(np.promote_types(vectors.dtype, np.float32))
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        raise UserError(f"{what} hold non-finite numbers in {_some_rows(~finite)}; remove those rows")
    scale = np.abs(rows).max(axis=1, initial=0.0)  # so that squares neither overflow nor vanish
    if not scale.all():
        raise UserError(f"{what} are all zero in {_some_rows(scale == 0)}, which have no direction; remove those rows")
    rows /= scale[:, None]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows, dtype=np.float32)


def _some_rows(mask: np.ndarray) -> str:
    rows = np.flatnonzero(mask)
    return f"rows {', '.join(map(str, rows[:5]))}{' and more' if len(rows) > 5 else ''}"


class CosineIndex:
    """N vectors with their uids; they and every query are normalised.

    Inside, a vector's FAISS id is a number that it keeps when others leave; `_numbers` holds those of the rows of
    `_vectors` and `_uids`, ascending.
    """

    def __init__(self, index: faiss.Index, uids: Uids, numbers: Rows, vectors: np.ndarray, facts: IndexFacts) -> None:
        self._index, self._uids, self._numbers, self._vectors = index, uids, numbers, vectors
        self._row_of = {uid: row for row, uid in enumerate(uids)}
        self.facts = facts
        self._searcher = _on_gpus(index)

    def __len__(self) -> int:
        return len(self._uids)

    def __contains__(self, uid: str) -> bool:
        return uid in self._row_of

    @property
    def uids(self) -> list[str]:
        return self._uids.tolist()

    @classmethod
    def build(cls, uids: Sequence[str], vectors: np.ndarray, model: str, flat_below: int = FLAT_BELOW) -> "CosineIndex":
        """Index the rows of `[N, D]`, named by N different uids.

        model: fingerprint of the checkpoint that made them. Below `flat_below` rows the search is exact; from there on
        it visits some of `4 sqrt(N)` inverted lists.
        """
        stored, unit = _as_stored(vectors)
        _check_uids(uids, len(unit))
        count, dimension = unit.shape
        numbers = np.arange(count, dtype=np.int64)
        lists = 0 if count < flat_below else max(1, min(LISTS_PER_ROOT * math.isqrt(count), count // POINTS_PER_LIST))
        index = _flat(dimension) if not lists else _inverted(unit, lists)
        index.add_with_ids(unit, numbers)
        facts = IndexFacts(dimension, count, "cosine", model, lists, probes=lists, made_for=count, recall_at_10=1.0)
        return cls(index, np.array(uids, dtype=object), numbers, stored, facts)._tuned()

    def search(self, queries: np.ndarray, k: int, model: str) -> tuple[Vectors, Uids]:
        """The k nearest of each query, nearest first.

        queries: `[Q, D]`. model: fingerprint of the checkpoint that made them. Returns cosines `[Q, K]` and uids
        `[Q, K]`, where K is k or, if that is smaller, the number of vectors. Raises UserError if the queries come from
        another model or have another dimension.
        """
        self._check_query(queries, k, model)
        similarities, rows = self._nearest(normalised(queries, "queries"), min(k, len(self)))
        return similarities, self._uids[rows]

    def _check_query(self, queries: np.ndarray, k: int, model: str) -> None:
        self._check_origin(queries, model, "queries")
        if not len(self):
            raise UserError("the index is empty; extract features of at least one picture first")
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")

    def _check_origin(self, vectors: np.ndarray, model: str, what: str) -> None:
        facts, shape = self.facts, np.shape(vectors)
        if len(shape) == 2 and shape[1] != facts.dimension:
            raise UserError(
                f"{what} have {shape[1]} dimensions (model {model}), the index {facts.dimension} "
                f"(model {facts.model}); encode them with the model that filled the index"
            )
        if model != facts.model:
            raise UserError(
                f"{what} come from model {model}, the index holds features of model {facts.model}; "
                "encode them with that model or build the index anew"
            )

    def _nearest(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        """Rows of the k nearest. Queries whose lists hold fewer than k, which FAISS fills up with -1, search all."""
        if self.facts.lists:
            _visit(self._searcher, self.facts.probes)
        similarities, numbers = self._searcher.search(queries, k)
        short = (numbers < 0).any(axis=1)
        rows = np.searchsorted(self._numbers, numbers)
        if self.facts.lists:
            similarities, rows = self._by_cosine(queries, rows)
        if short.any():
            similarities[short], rows[short] = self._exact(queries[short], k)
        return similarities, rows

    def _by_cosine(self, queries: Vectors, rows_QK: Rows) -> tuple[Vectors, Rows]:
        """The rows that lists found, whose vectors are rounded to float16, by their exact cosine."""
        cosines_QK = np.empty(rows_QK.shape, np.float32)
        at_once = max(1, EXACT_AT_ONCE // rows_QK.shape[1])
        for start in range(0, len(rows_QK), at_once):
            some = slice(start, start + at_once)
            near_RD = normalised(self._vectors[rows_QK[some].ravel()])
            near_QKD = near_RD.reshape(*rows_QK[some].shape, -1)
            cosines_QK[some] = np.einsum("qd,qkd->qk", queries[some], near_QKD)
        order_QK = np.argsort(-cosines_QK, axis=1, kind="stable")
        return np.take_along_axis(cosines_QK, order_QK, 1), np.take_along_axis(rows_QK, order_QK, 1)

    def _exact(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        """Some vectors at a time: they may be mapped, and more than memory holds."""
        best = faiss.ResultHeap(len(queries), k, keep_max=True)
        for start in range(0, len(self), EXACT_AT_ONCE):
            some = normalised(self._vectors[start : start + EXACT_AT_ONCE])
            similarities, rows = faiss.knn(queries, some, min(k, len(some)), metric=faiss.METRIC_INNER_PRODUCT)
            best.add_result(similarities, rows + start)
        best.finalize()
        return best.D, best.I

    def add(self, uids: Sequence[str], vectors: np.ndarray, model: str, flat_below: int = FLAT_BELOW) -> "CosineIndex":
        """The index with more vectors `[M, D]`; raises UserError for a uid that it holds, or another model's vectors.

        Lists made for far fewer vectors are made anew, and so is an index that outgrows exact search.
        """
        self._check_origin(vectors, model, "vectors")
        stored, unit = _as_stored(vectors)
        _check_uids(uids, len(unit))
        if known := [uid for uid in uids if uid in self]:
            raise UserError(f"the index holds {known[0]!r} already; remove it first, or give another uid")
        count = len(self) + len(unit)
        all_uids = np.concatenate([self._uids, np.array(uids, dtype=object)])
        all_vectors = np.concatenate([self._vectors, stored])
        outgrown = count > GROWTH * self.facts.made_for if self.facts.lists else count >= flat_below
        if outgrown:
            return CosineIndex.build(all_uids.tolist(), all_vectors, model, flat_below)
        first = int(self._numbers[-1]) + 1 if len(self) else 0
        numbers = np.arange(first, first + len(unit), dtype=np.int64)
        index = faiss.clone_index(self._index)
        index.add_with_ids(unit, numbers)
        numbers = np.concatenate([self._numbers, numbers])
        return CosineIndex(index, all_uids, numbers, all_vectors, replace(self.facts, count=count))._tuned()

    def remove(self, uids: Sequence[str]) -> "CosineIndex":
        """The index without some vectors; raises UserError for a uid that it does not hold."""
        if unknown := [uid for uid in uids if uid not in self]:
            raise UserError(f"the index does not hold {unknown[0]!r}; nothing was removed")
        kept = np.ones(len(self), dtype=bool)
        kept[[self._row_of[uid] for uid in uids]] = False
        index = faiss.clone_index(self._index)
        index.remove_ids(faiss.IDSelectorBatch(self._numbers[~kept]))
        facts = replace(self.facts, count=int(kept.sum()))
        return CosineIndex(index, self._uids[kept], self._numbers[kept], self._vectors[kept], facts)._tuned()

    def _tuned(self) -> "CosineIndex":
        """With the fewest visited lists that reach the wanted recall, which is measured."""
        if self.facts.lists and len(self) > 1:
            test = self._recall_test(10, PROBE_QUERIES)

            def recall(probes: int) -> float:
                self.facts = replace(self.facts, probes=probes)
                return self._recall(*test, 10)

            most = 1  # doubled first: visiting too many lists takes longest
            while most < self.facts.lists and recall(most) < WANTED_RECALL:
                most = min(2 * most, self.facts.lists)
            least = most // 2 + 1  # half as many were too few
            probes = least + bisect_left(range(least, most), WANTED_RECALL, key=recall)
            self.facts = replace(self.facts, recall_at_10=recall(probes))
        return self

    def _recall_test(self, k: int, queries: int) -> tuple[Vectors, Vectors]:
        """Vectors of the set, and the cosine to the k-th nearest other of each, `[Q]`."""
        chosen = normalised(self._vectors[_spread(len(self), queries)])
        return chosen, self._exact(chosen, min(k + 1, len(self)))[0][:, -1]

    def _recall(self, chosen: Vectors, least: Vectors, k: int) -> float:
        found, _ = self._nearest(chosen, min(k + 1, len(self)))
        return float((found[:, 1:] >= least[:, None] - 1e-6).mean())

    def save(self, folder: Path) -> str:
        """Make this the set that `folder` holds, and return its version: a hash of its content.

        What the folder held before is replaced at once, when all is written; it stays beside the new set for readers
        that have just opened it.
        """
        facts = asdict(self.facts)
        with whole_folder(folder / "new") as temporary:
            np.save(temporary / VECTORS, np.asarray(self._vectors))
            pq.write_table(pa.table({"number": self._numbers, "uid": self._uids}), temporary / IDS)
            faiss.write_index(self._index, str(temporary / INDEX))
            write_json(temporary / FACTS, facts)
            write_manifest(temporary, inputs={"model": self.facts.model}, counts={"vectors": len(self)})
            version = fingerprint({name: sha256(temporary / name) for name in (VECTORS, IDS, INDEX, FACTS)})
        if (folder / version).exists():
            shutil.rmtree(folder / "new")
        else:
            (folder / "new").rename(folder / version)
        before = _current(folder) if (folder / CURRENT).is_file() else version
        write_json(folder / CURRENT, {"version": version, "before": before})
        for old in folder.iterdir():
            if (old / FACTS).is_file() and old.name not in (version, before):
                shutil.rmtree(old, ignore_errors=True)
        return version

    @classmethod
    def load(cls, folder: Path) -> "CosineIndex":
        """Read what `save` wrote; vectors are mapped, not read. UserError if a file is missing or damaged."""
        while True:
            version = _current(folder)
            try:
                return cls._read(folder / version)
            except (UserError, OSError, RuntimeError):  # RuntimeError: FAISS's for a file that is gone
                if version == _current(folder):  # else it was replaced meanwhile
                    raise

    @classmethod
    def _read(cls, at: Path) -> "CosineIndex":
        if problem := damage(at, READ_UP_TO):
            raise UserError(f"{at} is damaged: {problem}; run `mdc stage extract`")
        try:
            facts = IndexFacts(**read_json(at / FACTS))
        except TypeError as error:
            raise UserError(f"{at / FACTS} does not describe an index ({error}); run `mdc stage extract`") from None
        index, table = faiss.read_index(str(at / INDEX)), pq.read_table(at / IDS)
        vectors = np.load(at / VECTORS, mmap_mode="r")
        sizes = {"facts": facts.count, INDEX: index.ntotal, IDS: len(table), VECTORS: len(vectors)}
        if len(set(sizes.values())) > 1 or index.d != facts.dimension or facts.metric != "cosine":
            raise UserError(f"{at}: its files do not belong together: {sizes}; run `mdc stage extract`")
        uids = np.array(table["uid"].to_pylist(), dtype=object)
        return cls(index, uids, table["number"].to_numpy(), vectors, facts)


def _current(folder: Path) -> str:
    if not (folder / CURRENT).is_file():
        raise UserError(f"{folder} holds no index; run `mdc stage extract`, or make one by `mdc index add`")
    return str(read_json(folder / CURRENT)["version"])


def _as_stored(vectors: np.ndarray) -> tuple[np.ndarray, Vectors]:
    """Normalised rows in float16, and those as float32 rows of length 1: what is stored is what is searched."""
    stored = normalised(vectors).astype(np.float16)
    return stored, normalised(stored)


def _check_uids(uids: Sequence[str], count: int) -> None:
    if len(uids) != count:
        raise UserError(f"{len(uids)} uids for {count} vectors; give one each")
    if len(set(uids)) < count:
        twice, _ = Counter(uids).most_common(1)[0]
        raise UserError(f"uid {twice!r} is given twice; uids name one vector each")


def _flat(dimension: int) -> faiss.Index:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


def _inverted(unit: Vectors, lists: int) -> faiss.Index:
    """Trained, without vectors. Its lists hold them in float16: half the memory, and half of what a query reads."""
    dimension, half = unit.shape[1], faiss.ScalarQuantizer.QT_fp16
    quantizer = faiss.IndexFlatIP(dimension)
    index = faiss.IndexIVFScalarQuantizer(quantizer, dimension, lists, half, faiss.METRIC_INNER_PRODUCT)
    index.by_residual = False
    index.cp.spherical, index.cp.niter = True, ROUNDS
    index.train(unit[_spread(len(unit), TRAINED_PER_LIST * lists)])
    return index


def _on_gpus(index: faiss.Index) -> faiss.Index:
    return faiss.index_cpu_to_all_gpus(index) if faiss.get_num_gpus() else index


def _visit(searcher: faiss.Index, lists: int) -> None:
    """Let every query visit so many lists."""
    space = faiss.GpuParameterSpace() if faiss.get_num_gpus() else faiss.ParameterSpace()
    space.set_index_parameter(searcher, "nprobe", lists)


def measure_recall(index: CosineIndex, k: int = 10, queries: int = PROBE_QUERIES) -> float:
    """Mean share of the exact k nearest that the index finds, over vectors of the set spread evenly over it.

    Each is looked for among the others, since finding itself is easy. A result counts as found if it is as near as the
    exact k-th, so that equal vectors do not lower the figure.
    """
    return index._recall(*index._recall_test(k, queries), k) if len(index) > 1 else 1.0


def _spread(count: int, wanted: int) -> Rows:
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).astype(np.int64))
