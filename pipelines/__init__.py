"""Prefect flows over the stages of dvc.yaml: Prefect asks DVC, DVC asks the library.

This file runs before any flow imports Prefect. It makes the libraries quiet (by importing mdc) and checks what would
keep Prefect's temporary server from starting.
"""

import sys

from mdc.doctor import check_backport
from mdc.errors import UserError

try:
    check_backport()
except UserError as error:
    sys.exit(f"error: {error}")
