"""Tables without lines, in any width."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rich.console import RenderableType
from rich.table import Table


def plain_table(
    title: str,
    headings: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    right: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """Make a table.

    right: headings of columns that end at the right, as numbers do.  whole: of those that stay on
    one line; words of others wrap.
    """
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading in whole,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table
