"""`python -m bench [ROW ...]`: measure the rows named, or all, each in a process of its own, and write RESULTS.md."""

import argparse
import importlib
import subprocess
import sys

from bench.frame import PAGE, machine, record

# Name and module. A row's figures take the place of those it left in RESULTS.md; other rows keep theirs.
ROWS = {
    "step": "bench.step",
    "memory": "bench.memory",
    "clip": "bench.clip",
    "growth": "bench.growth",
    "download": "bench.download",
    "preparing": "bench.preparing",
    "loader": "bench.loader",
    "start": "bench.start",
    "probe": "bench.probe",
    "scoring": "bench.scoring",
    "captions": "bench.captions",
    "neighbours": "bench.neighbours",
}
THREADS = 2


def measure(row: str) -> None:
    import torch

    torch.set_num_threads(THREADS)
    figures = importlib.import_module(ROWS[row]).measure()
    record(row, figures, machine(THREADS), list(ROWS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    rows = parser.parse_args().rows
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; one of {', '.join(ROWS)}")
    if len(rows) == 1:
        measure(rows[0])
        return
    failed = []
    for row in rows or ROWS:
        print(f"{row} ...", flush=True)
        if subprocess.run([sys.executable, "-m", "bench", row]).returncode:
            failed.append(row)
    print(f"figures in {PAGE}")
    if failed:
        sys.exit(f"error: no figures from {', '.join(failed)}")


if __name__ == "__main__":
    main()
