"""Tables in the terminal: where there is little room names fold and gaps shrink, and numbers are never cut."""

from typing import Any

from rich.console import Console
from rich.table import Table

FOLDED = 7  # characters to which columns fold at most
LITERAL: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}  # names may hold brackets and colons
WIDE = Console(width=10_000, **LITERAL)


def show(*tables: Table) -> None:
    """Print tables as wide as the terminal, or wider where their numbers need it; into a file or a pipe, a row a line.

    Columns that may fold are those that are not `no_wrap`.
    """
    for table in tables:
        screen = Console()
        width = screen.width if screen.is_terminal else WIDE.measure(table).maximum
        if narrowest(table) > width:
            table.padding, table.pad_edge = 0, False
        Console(width=max(width, narrowest(table)), **LITERAL).print(table)


def narrowest(table: Table) -> int:
    """The width at which names that fold leave every number whole."""
    folding = [column for column in table.columns if not column.no_wrap]
    for column in folding:
        column.max_width = FOLDED
    width = WIDE.measure(table).maximum
    for column in folding:
        column.max_width = None
    return width
