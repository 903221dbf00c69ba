"""Nearest neighbours by cosine: FAISS behind checks, and beside the index the facts that a query must agree with."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from mdc.errors import UserError
from mdc.files import read_json, whole_file, write_json

FLAT_BELOW = 20_000  # vectors; below it exact search is quick enough and lists would be small
LISTS_PER_ROOT = 4  # inverted lists: 4 sqrt(n), the lower end of what FAISS's guidelines suggest
POINTS_PER_LIST = 39  # the fewest training points per list that FAISS's k-means asks for
PROBE_QUERIES = 256  # queries on which nprobe is chosen and recall is measured
WANTED_RECALL = 0.95  # recall@10 for which nprobe is raised

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class IndexFacts:
    """What a query must agree with. model: fingerprint of the checkpoint whose features these are."""

    dimension: int
    count: int
    metric: str
    model: str
    lists: int  # 0 = exact search
    probes: int  # lists visited per query


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
    """N vectors whose ids are their row numbers `0 .. N - 1`; they and every query are normalised."""

    def __init__(self, index: faiss.Index, facts: IndexFacts):
        self._index = index
        self.facts = facts

    @classmethod
    def build(cls, vectors: np.ndarray, model: str, flat_below: int = FLAT_BELOW) -> "CosineIndex":
        """Index the rows of `[N, D]`.

        model: fingerprint of the checkpoint that made them. Below `flat_below` rows the search is exact; from there on
        it visits some of `4 sqrt(N)` inverted lists, as many as recall@10 of 0.95 takes.
        """
        unit = normalised(vectors)
        count, dimension = unit.shape
        if count < flat_below:
            flat = faiss.IndexFlatIP(dimension)
            flat.add(unit)
            return cls(flat, IndexFacts(dimension, count, "cosine", model, lists=0, probes=0))
        lists = max(1, min(LISTS_PER_ROOT * math.isqrt(count), count // POINTS_PER_LIST))
        inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, lists, faiss.METRIC_INNER_PRODUCT)
        inverted.train(unit)
        inverted.add(unit)
        probes = _choose_probes(inverted, unit, lists)
        return cls(inverted, IndexFacts(dimension, count, "cosine", model, lists, probes))

    def search(self, queries: np.ndarray, k: int, model: str) -> tuple[Vectors, Rows]:
        """The k nearest rows of each query, nearest first.

        queries: `[Q, D]`. model: fingerprint of the checkpoint that made them. Returns cosines `[Q, K]` and row numbers
        `[Q, K]`, where K is k or, if that is smaller, the number of vectors; every row number is that of a vector.
        Raises UserError if the queries come from another model or have another dimension.
        """
        self._check_query(queries, k, model)
        return _search(self._index, normalised(queries, "queries"), min(k, self.facts.count), self.facts.probes)

    def _check_query(self, queries: np.ndarray, k: int, model: str) -> None:
        facts, shape = self.facts, np.shape(queries)
        if len(shape) == 2 and shape[1] != facts.dimension:
            raise UserError(
                f"queries have {shape[1]} dimensions (model {model}), the index {facts.dimension} "
                f"(model {facts.model}); encode them with the model that filled the index"
            )
        if model != facts.model:
            raise UserError(
                f"queries come from model {model}, the index holds features of model {facts.model}; "
                "encode them with that model or build the index anew"
            )
        if facts.count == 0:
            raise UserError("the index is empty; extract features of at least one picture first")
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")

    def save(self, path: Path) -> None:
        """Write the vectors to `path` and the facts beside it, as `<name>.json`."""
        with whole_file(path) as temporary:
            faiss.write_index(self._index, str(temporary))
        write_json(path.with_suffix(".json"), asdict(self.facts))

    @classmethod
    def load(cls, path: Path) -> "CosineIndex":
        """Read what `save` wrote; UserError if a file is missing or the two do not belong together."""
        facts_path = path.with_suffix(".json")
        for file in (path, facts_path):
            if not file.is_file():
                raise UserError(f"{file} is not there; run `mdc stage extract`")
        try:
            facts = IndexFacts(**read_json(facts_path))
        except (TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{facts_path} does not describe an index ({error}); run `mdc stage extract`") from None
        index = faiss.read_index(str(path))
        if (index.d, index.ntotal) != (facts.dimension, facts.count) or facts.metric != "cosine":
            raise UserError(
                f"{path} holds {index.ntotal} vectors of {index.d} dimensions, {facts_path.name} says {facts.count} of "
                f"{facts.dimension} by {facts.metric}; run `mdc stage extract`"
            )
        return cls(index, facts)


def measure_recall(index: CosineIndex, vectors: np.ndarray, k: int = 10, queries: int = PROBE_QUERIES) -> float:
    """Mean share of the exact k nearest that the index finds, over queries spread evenly over its own `[N, D]` vectors.

    A result counts as found if it is as near as the exact k-th, so that equal vectors do not lower the figure.
    """
    unit = normalised(vectors)
    chosen = unit[_spread(len(unit), queries)]
    found, _ = index.search(chosen, k, index.facts.model)
    return _recall(found, _exact(unit, chosen, k))


def _spread(count: int, wanted: int) -> Rows:
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).astype(np.int64))


def _exact(unit: Vectors, queries: Vectors, k: int) -> Vectors:
    """The k largest cosines of each query, `[Q, K]`, largest first."""
    return faiss.knn(queries, unit, min(k, len(unit)), metric=faiss.METRIC_INNER_PRODUCT)[0]


def _recall(found: Vectors, exact: Vectors) -> float:
    return float((found >= exact[:, -1:] - 1e-6).mean())


def _choose_probes(index: faiss.IndexIVFFlat, unit: Vectors, lists: int, k: int = 10) -> int:
    """The smallest power of two of visited lists that reaches the wanted recall."""
    queries = unit[_spread(len(unit), PROBE_QUERIES)]
    exact = _exact(unit, queries, k)
    probes = 1
    while probes < lists and _recall(_search(index, queries, k, probes)[0], exact) < WANTED_RECALL:
        probes *= 2
    return min(probes, lists)


def _search(index: faiss.Index, queries: Vectors, k: int, probes: int) -> tuple[Vectors, Rows]:
    """FAISS fills up with -1 where the visited lists hold too few vectors; those queries visit every list instead."""
    if probes == 0:
        return index.search(queries, k)
    similarities, rows = index.search(queries, k, params=_visiting(probes))
    short = (rows < 0).any(axis=1)
    if short.any():
        everywhere = _visiting(faiss.extract_index_ivf(index).nlist)
        similarities[short], rows[short] = index.search(queries[short], k, params=everywhere)
    assert (rows >= 0).all(), "FAISS found fewer rows than the index holds"
    return similarities, rows


def _visiting(probes: int) -> faiss.SearchParametersIVF:
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe = probes
    return parameters
