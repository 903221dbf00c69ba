"""Pictures that are the same, or nearly: which rows share one, which stand for missing pictures, what goes together.

All of this looks at the whole list at once, and is done by DuckDB in bounded memory. Only pairs of pictures that are
alike, and groups that these tie together, are held in memory.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import imagehash
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mdc.config import CaptionParams, DownloadParams
from mdc.data.images import Rejected, decode
from mdc.data.tables import DUPLICATES, database, one_row, parquet, stream
from mdc.data.tars import members
from mdc.errors import UserError
from mdc.files import whole_folder, write_json

WORDS = ("hash_0", "hash_1", "hash_2", "hash_3")  # of 64 bits
BITS = 256  # of a perceptual hash
TOP = 20  # pictures listed in it
REPEATED, EXCLUDED, DUPLICATE = "repeated_picture", "evaluation_picture", "duplicate_picture"
DECISION_SCHEMA = pa.schema([("uid", pa.string()), ("group", pa.string()), ("reason", pa.string())])
PICTURES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".png", ".ppm", ".tif", ".tiff", ".webp")
NAME = (  # of a row's group
    "CASE WHEN \"group\" <> '' THEN \"group\" WHEN sha256 <> '' THEN 'content ' || sha256 ELSE 'row ' || uid END"
)


def perceptual_hash(image: Image.Image) -> list[int]:
    """256 bits as four numbers: the signs of the lowest 16 x 16 frequencies against their median.

    Recompressing or shrinking a photograph changes a few of them, two different photographs differ in about 120; a
    picture cropped at its edges is another one.
    """
    bits = imagehash.phash(image, hash_size=16).hash
    return np.packbits(bits).view(">u8").astype(np.uint64).tolist()


def hashes_in(tar: Path) -> dict[str, list[int]]:
    """The perceptual hash of every picture of a tar, by uid."""
    hashes = {}
    with tar.open("rb") as file:
        for member in members(tar):
            file.seek(member.offset)
            with Image.open(io.BytesIO(file.read(member.size))) as image:
                hashes[member.name.partition(".")[0]] = perceptual_hash(image)
    return hashes


def evaluation_files(place: Path) -> list[Path]:
    """The pictures in a folder and below, or those that a text file names, one path per line."""
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix.lower() in PICTURES)
    elif place.is_file():
        try:
            lines = place.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"caption.exclude: {place} cannot be read as UTF-8 text: {error}") from None
        files = [place.parent / line.strip() for line in lines if line.strip()]
    else:
        raise UserError(f'caption.exclude: {place} is neither a folder nor a file; correct it, or set it to ""')
    if not files:
        raise UserError(f"caption.exclude: {place} names no picture; give a folder of {', '.join(PICTURES)}, or a list")
    if lost := [file for file in files if not file.is_file()]:
        raise UserError(f"caption.exclude: {place} names {lost[0]}, which is not there")
    return files


def _evaluation_hashes(place: str) -> pa.Table:
    """sha256 and perceptual hash of the pictures that must not be trained on."""
    usual = DownloadParams()
    rows: list[dict[str, Any]] = []
    for file in evaluation_files(Path(place)) if place else []:
        data = file.read_bytes()
        row: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest()}
        try:
            image, _ = decode(data, (255, 255, 255), usual.max_pixels, float("inf"))
        except Rejected as rejected:
            raise UserError(f"caption.exclude: {file} cannot be read ({rejected}); mend or remove it") from None
        rows.append(row | dict(zip(WORDS, perceptual_hash(image), strict=True)))
    return pa.Table.from_pylist(rows, pa.schema([("sha256", pa.string()), *((name, pa.uint64()) for name in WORDS)]))


def components(links: pa.Table) -> pa.Table:
    """name and first: every name that `links` (columns a, b) ties to others, and the smallest name of its set."""
    ends = pa.chunked_array([*links["a"].chunks, *links["b"].chunks], pa.string()).combine_chunks().dictionary_encode()
    codes, size = ends.indices.to_numpy(), len(ends.dictionary)
    half = len(links)
    edges = coo_array((np.ones(half, np.int8), (codes[:half], codes[half:])), shape=(size, size))
    _, sets = connected_components(edges, directed=False)
    names = pd.Series(ends.dictionary.to_pylist(), dtype=object)
    return pa.table({"name": pa.array(names, pa.string()), "first": pa.array(names.groupby(sets).transform("min"))})


def _bands(bits: int) -> list[str]:
    """SQL for parts of a hash such that two hashes that differ in up to `bits` bits are equal in one part at least."""
    if bits == 0:
        return [f"({', '.join(WORDS)})"]
    width = 32 if bits < BITS // 32 else 16
    mask = 2**width - 1
    return [f"(({word} >> {shift}) & {mask})" for word in WORDS for shift in range(0, 64, width)]


def _differing(one: str, other: str) -> str:
    return " + ".join(f"bit_count(xor({one}.{word}, {other}.{word}))" for word in WORDS)


def _near(db: duckdb.DuckDBPyConnection, one: str, other: str, bits: int, ordered: bool) -> None:
    """Table `near` (a, b): names of rows of two tables of hashes that differ in up to `bits` bits."""
    db.execute("CREATE OR REPLACE TEMP TABLE near (a VARCHAR, b VARCHAR)")
    for band in _bands(bits):
        columns = f"name, {', '.join(WORDS)}, {band} AS band"
        db.execute(
            f"INSERT INTO near SELECT x.name, y.name FROM (SELECT {columns} FROM {one}) x "
            f"JOIN (SELECT {columns} FROM {other}) y ON x.band = y.band {'AND x.name < y.name' if ordered else ''} "
            f"WHERE {_differing('x', 'y')} <= {bits}"
        )


def _find_alike(db: duckdb.DuckDBPyConnection, params: CaptionParams) -> None:
    """Tables `repeated` and `excluded` (sha256), and `sets` (name, first) of pictures that are alike."""
    hashes = ", ".join(WORDS)
    first_hashes = ", ".join(f"min({word}) AS {word}" for word in WORDS)
    db.execute(
        f"CREATE TEMP TABLE pictures AS SELECT sha256, count(*) AS times, {first_hashes} "
        "FROM listed WHERE sha256 <> '' GROUP BY sha256"
    )
    db.execute(f"CREATE TEMP TABLE repeated AS SELECT sha256 FROM pictures WHERE times > {params.max_repeats}")
    # evaluation is small: it is a table in memory
    db.register("evaluation", _evaluation_hashes(params.exclude))
    db.execute("CREATE TEMP TABLE excluded AS SELECT sha256 FROM pictures SEMI JOIN evaluation USING (sha256)")
    db.execute("CREATE TEMP TABLE links (a VARCHAR, b VARCHAR)")
    if params.alike_bits >= 0:
        db.execute(
            f"CREATE TEMP TABLE hashes AS SELECT min(sha256) AS name, {hashes} FROM pictures ANTI JOIN repeated "
            f"USING (sha256) WHERE hash_0 IS NOT NULL GROUP BY {hashes}"
        )
        _near(db, "hashes", "(SELECT sha256 AS name, * FROM evaluation)", params.alike_bits, ordered=False)
        db.execute(
            f"INSERT INTO excluded SELECT sha256 FROM pictures JOIN hashes USING ({hashes}) "
            "WHERE name IN (SELECT a FROM near)"
        )
        if params.alike_bits > 0:
            _near(db, "hashes", "hashes", params.alike_bits, ordered=True)
            db.execute("INSERT INTO links SELECT DISTINCT a, b FROM near")
        db.execute(
            f"INSERT INTO links SELECT sha256, name FROM pictures JOIN hashes USING ({hashes}) WHERE sha256 <> name"
        )
    db.register("found_sets", components(db.sql("SELECT a, b FROM links").to_arrow_table()))
    db.execute("CREATE TEMP TABLE sets AS SELECT * FROM found_sets")


def _name_rows(db: duckdb.DuckDBPyConnection) -> None:
    """View `placed`: each row with the set of its picture and the name of its group; `groups` joins names."""
    db.execute(
        f"CREATE TEMP VIEW placed AS SELECT part, uid, usable, sha256, {NAME} AS name, "
        "coalesce(sets.first, sha256) AS alike FROM listed LEFT JOIN sets ON sets.name = listed.sha256"
    )
    db.execute(
        "CREATE TEMP TABLE ties AS SELECT alike, min(name) AS a, max(name) AS last FROM placed WHERE alike <> '' "
        "GROUP BY alike HAVING a <> last"
    )
    links = db.sql("SELECT DISTINCT a, name AS b FROM placed JOIN ties USING (alike) WHERE a <> name")
    db.register("found_groups", components(links.to_arrow_table()))
    db.execute("CREATE TEMP TABLE groups AS SELECT * FROM found_groups")


def _decisions(db: duckdb.DuckDBPyConnection, params: CaptionParams) -> Iterator[pa.Table]:
    """part, uid, group and reason of every row, sorted by part and uid."""
    db.execute("CREATE TEMP TABLE firsts (alike VARCHAR, first_uid VARCHAR)")
    if params.alike == "drop":
        db.execute(
            "INSERT INTO firsts SELECT alike, min(uid) FROM placed WHERE usable AND sha256 <> '' AND sha256 NOT IN "
            "(SELECT sha256 FROM excluded) GROUP BY alike HAVING count(*) > 1"
        )
    yield from stream(
        db,
        'SELECT part, uid, coalesce(groups.first, name) AS "group", CASE '
        f"WHEN sha256 IN (SELECT sha256 FROM repeated) THEN '{REPEATED}' "
        f"WHEN sha256 IN (SELECT sha256 FROM excluded) THEN '{EXCLUDED}' "
        f"WHEN first_uid <> uid THEN '{DUPLICATE}' ELSE '' END AS reason "
        "FROM placed LEFT JOIN groups USING (name) LEFT JOIN firsts USING (alike) ORDER BY part, uid",
    )


def _summary(db: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """How many pictures are there more than once, or nearly, and those with the most rows."""
    numbers = one_row(
        db,
        "SELECT count(*), coalesce(sum(times), 0)::BIGINT, count(*) FILTER (times > 1), "
        "coalesce(sum(times) FILTER (times > 1), 0)::BIGINT FROM pictures",
    )
    sets = one_row(
        db,
        "SELECT count(DISTINCT first), count(*), coalesce(max(size), 0) FROM sets "
        "LEFT JOIN (SELECT first, count(*) AS size FROM sets GROUP BY first) USING (first)",
    )
    top = db.execute(
        "SELECT sha256, times, min(url), min(uid) FROM pictures JOIN listed USING (sha256) WHERE times > 1 "
        f"GROUP BY sha256, times ORDER BY times DESC, sha256 LIMIT {TOP}"
    ).fetchall()
    return {
        **dict(zip(("pictures", "rows", "repeated_pictures", "repeated_rows"), numbers, strict=True)),
        **dict(zip(("alike_sets", "alike_pictures", "largest_alike_set"), sets, strict=True)),
        "top": [dict(zip(("sha256", "rows", "url", "uid"), row, strict=True)) for row in top],
    }


def decide(params: CaptionParams, listed: Path, scratch: Path, output: Path) -> None:
    """Write `output`: per part a parquet file of DECISION_SCHEMA sorted by uid, and `duplicates.json`.

    listed: parquet files with part, uid, group, url, sha256, the words of a perceptual hash (null = none), and
    usable (whether a caption is left). A row's group is the smallest name of all that share a group, a picture or an
    alike picture with it, directly or through others. Reasons: repeated_picture, evaluation_picture,
    duplicate_picture, "".
    """
    with database(scratch) as db, whole_folder(output) as temporary:
        db.execute(f"CREATE TEMP VIEW listed AS SELECT * FROM {parquet(listed)}")
        _find_alike(db, params)
        _name_rows(db)
        _write_parts(_decisions(db, params), temporary)
        write_json(temporary / DUPLICATES, _summary(db))


def _write_parts(tables: Iterator[pa.Table], folder: Path) -> None:
    """Cut a stream sorted by part into one file per part."""
    pending: list[pa.Table] = []

    def write() -> None:
        whole = pa.concat_tables(pending)
        pq.write_table(
            whole.select(DECISION_SCHEMA.names).cast(DECISION_SCHEMA), folder / f"{whole['part'][0]}.parquet"
        )

    for table in tables:
        while table.num_rows:
            part = table["part"][0].as_py()
            if pending and pending[0]["part"][0].as_py() != part:
                write()
                pending = []
            size = pc.sum(pc.equal(table["part"], part)).as_py()
            pending.append(table.slice(0, size))
            table = table.slice(size)
    if pending:
        write()
