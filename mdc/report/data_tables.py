"""What a list of pairs became, as tables for the terminal and for the page."""

from collections.abc import Iterator, Mapping

from mdc.data.captions import CAPTIONED
from mdc.data.stats import Stats
from mdc.report import words
from mdc.report.tables import Cell, Table, count, percent

REPEATS = 10  # pictures listed


def _counts(caption: str, columns: tuple[str, str, str], numbers: Mapping[str, int]) -> Table:
    """Names with their counts and shares."""
    total = sum(numbers.values())
    rows = tuple((Cell(name), Cell(count(n)), Cell(percent(n / total))) for name, n in numbers.items())
    return Table(caption=caption, columns=columns, rows=rows)


def coverage_table(stats: Stats) -> Table:
    """Every row of the list: what the download and the caption stage made of it."""
    listed = sum(stats.statuses.values())
    told = CAPTIONED if stats.reasons else ()  # these rows are told by the caption stage's reasons
    rows = [("download", status, n) for status, n in stats.statuses.items() if status not in told]
    rows += [("caption", reason, n) for reason, n in stats.reasons.items()]
    rows.sort(key=lambda row: (row[1] not in ("ok", "kept"), -row[2]))
    return Table(
        caption=f"What became of {count(listed)} rows of the list.",
        columns=("Stage and reason", "Rows", "% of the list"),
        rows=tuple(
            (Cell(f"{stage}: {words.reason(reason)}"), Cell(count(n)), Cell(percent(n / listed)))
            for stage, reason, n in rows
        ),
    )


def host_table(stats: Stats) -> Table:
    return Table(
        caption=f"Hosts with the most rows, of {count(stats.host_count)}.",
        columns=("Host", "Rows", "Stored, %"),
        rows=tuple(
            (Cell(host.name or "(none)"), Cell(count(host.listed)), Cell(percent(host.stored / host.listed)))
            for host in stats.hosts
        ),
    )


def length_table(stats: Stats) -> Table:
    """Quantiles of the kept captions' lengths."""
    return Table(
        caption="Lengths of the captions that were kept.",
        columns=("In", "shortest", "5 %", "25 %", "median", "75 %", "95 %", "longest"),
        rows=tuple(
            (Cell(name), *(Cell(count(int(value))) for value in values))
            for name, values in (("tokens", stats.tokens), ("characters", stats.characters))
        ),
    )


def side_table(stats: Stats) -> Table:
    sides = {f"{side} to {2 * side - 1}": n for side, n in stats.sides.items()}
    return _counts("Shorter sides of the pictures as they came.", ("Pixels", "Pictures", "%"), sides)


def duplicate_sentence(stats: Stats) -> str:
    """How many pictures there are more than once, or nearly."""
    found = stats.duplicates
    told = f"{count(found['rows'])} rows show {count(found['pictures'])} different pictures"
    told += f", {count(found['repeated_pictures'])} of them in more than one row"
    if top := found["top"]:
        told += f" (at most {count(top[0]['rows'])})"
    if found["alike_pictures"]:
        told += (
            f"; {count(found['alike_pictures'])} pictures have others that are nearly the same, in "
            f"{count(found['alike_sets'])} sets of at most {count(found['largest_alike_set'])}"
        )
    return f"{told}."


def repeat_table(stats: Stats) -> Table:
    return Table(
        caption="Pictures in the most rows.",
        columns=("SHA-256 and first URL", "Rows"),
        rows=tuple(
            (Cell(row["sha256"][:12], row["url"] or ""), Cell(count(row["rows"])))
            for row in stats.duplicates["top"][:10]
        ),
    )


def data_tables(stats: Stats) -> Iterator[Table]:
    """All of it, for the terminal."""
    yield coverage_table(stats)
    yield host_table(stats)
    if stats.sides:
        yield side_table(stats)
    if stats.tokens:
        yield length_table(stats)
    if len(stats.sources) > 1:
        yield _counts("Captions kept, by source.", ("Source", "Captions", "%"), stats.sources)
    if stats.splits:
        yield _counts(
            f"Pairs by split, in {count(stats.shards)} shards of {stats.shard_bytes / 1e6:,.1f} MB together.",
            ("Split", "Pairs", "%"),
            stats.splits,
        )
    if stats.duplicates.get("top"):
        yield repeat_table(stats)
