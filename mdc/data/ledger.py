"""The parts of a plan in a folder that survives a kill: which are done, what failed, and what is asked again.

Every part's parquet file is the ledger of its rows: a status each, and details. What failed for a reason that may pass
is asked for again by the next run, alone.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdc.data.parts import EARLIER, ROWS, TAR, final_rows, is_done, is_final, part_path, reopen
from mdc.data.plan import Plan
from mdc.data.work import claim, place


class Ledger:
    """Finished and unfinished parts of one plan."""

    def __init__(self, folder: Path, plan: Plan, identity: dict[str, Any]) -> None:
        """Keeps finished parts of the same plan and settings; those of others are removed."""
        self.folder, self.plan, self.identity = folder, plan, identity
        claim(folder, identity)
        for left in [*folder.glob("*.progress"), *folder.glob(".*.tmp")]:
            left.unlink()
        self._done = {part for part in range(plan.parts) if is_done(folder, part, plan.uids(part))}
        for part in range(plan.parts):
            if part not in self._done and not is_done(folder, part, plan.uids(part), EARLIER):
                part_path(folder, part, EARLIER).unlink(missing_ok=True)

    def adopt(self, finished: Path) -> None:
        """Take over whole parts of an earlier run that came to its end."""
        for part in self.missing():
            if not part_path(self.folder, part, EARLIER).exists() and is_done(finished, part, self.plan.uids(part)):
                for suffix in (TAR, ROWS):
                    part_path(self.folder, part, suffix).unlink(missing_ok=True)
                    place(part_path(finished, part, suffix), part_path(self.folder, part, suffix))
                self._done.add(part)

    def reopen(self) -> None:
        """Have what failed for a reason that may pass asked for again."""
        for part in sorted(self._done):
            if not all(map(is_final, self._statuses(part))):
                reopen(self.folder, part)
                self._done.discard(part)

    def missing(self) -> list[int]:
        return [part for part in range(self.plan.parts) if part not in self._done]

    def asked(self, part: int) -> pa.Table:
        """The rows of a missing part that are to be asked for."""
        known = [row["uid"] for row in final_rows(self.folder, part)]
        rows = self.plan.part(part)
        return rows.filter(pc.invert(pc.is_in(rows["uid"], pa.array(known, pa.string()))))

    def known_rows(self) -> int:
        """How many rows need not be asked for."""
        missing = self.missing()
        return self.plan.rows - sum(self.plan.part_rows(part) - len(final_rows(self.folder, part)) for part in missing)

    def statuses(self) -> Counter[str]:
        """Of every row that was asked for. Raises RuntimeError if a row is missing."""
        self._done |= {part for part in self.missing() if is_done(self.folder, part, self.plan.uids(part))}
        if missing := self.missing():
            raise RuntimeError(f"parts {missing} lack rows; the messages above say what befell them")
        counts: Counter[str] = Counter()
        for part in range(self.plan.parts):
            counts.update(self._statuses(part))
        return counts

    def _statuses(self, part: int) -> list[str]:
        return pq.read_table(part_path(self.folder, part, ROWS), columns=["status"])["status"].to_pylist()

    def place(self, output: Path) -> None:
        """Put all parts into the folder `output`."""
        for part in range(self.plan.parts):
            for suffix in (TAR, ROWS):
                place(part_path(self.folder, part, suffix), part_path(output, part, suffix))
