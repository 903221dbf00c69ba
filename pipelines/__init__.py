"""Prefect flows over the stages of dvc.yaml: Prefect asks DVC, DVC asks the library.

This file runs before any flow imports Prefect. It makes the libraries quiet (by importing mdc) and checks what would
keep Prefect's temporary server from starting.
"""

import sys

from mdc.errors import UserError
from mdc.processes import end_on_ctrl_c

if sys.argv[0] == "-m":  # `python -m pipelines.full`: importing Prefect takes seconds, and `main` is not there yet
    end_on_ctrl_c()


def _check() -> None:
    from mdc.doctor import check_backport

    try:
        check_backport()
    except UserError as error:
        sys.exit(f"error: {error}")


_check()
