"""A sheet to draw on: rectangles, text and arrows in the pictures' one style, written as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, QUIET, PAPER, LINE = "#1f2933", "#6b7785", "#ffffff", "#c3ccd5"
RANKS = ("#4c78a8", "#f2a04b", "#59a14f", "#b07aa1")  # one colour a rank
TINTS = ("#d5e2f0", "#fde3c8", "#d6ebd2", "#eadbe6")  # the same, behind text
SANS = "system-ui, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"


class Sheet:
    """Elements in the order in which they are drawn; units are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.elements: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PAPER,
        line: str = LINE,
        *,
        radius: float = 3,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle by its upper left corner."""
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
            f' fill="{fill}" stroke="{line}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: object,
        *,
        size: float = 13,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write a line of text; y is its baseline, anchor is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{MONO if mono else SANS}" font-size="{size:g}"'
            f' fill="{color}" text-anchor="{anchor}"{weight}>{escape(str(words))}</text>'
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], color: str = QUIET, *, dashed: bool = False
    ) -> None:
        """Draw a line through the points with a head at its end."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(
            f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.6"'
            f' marker-end="url(#head)"{dashes}/>'
        )

    def dot(self, x: float, y: float, fill: str, *, hollow: bool = False) -> None:
        """Draw a token."""
        inside = PAPER if hollow else fill
        self.elements.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="5.5" fill="{inside}" stroke="{fill}"'
            ' stroke-width="1.6"/>'
        )

    def write(self, file: Path) -> None:
        """Write the sheet to a file."""
        file.write_text(str(self))

    def __str__(self) -> str:
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>{escape(self.title)}</title><defs>{head}</defs>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
            *self.elements,
            "</svg>\n",
        ]
        return "\n".join(lines)
