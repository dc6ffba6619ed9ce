"""alike: what many stages have in common, on one line.

Up to FEW stages are shown one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

FEW = 8
LINES = 16  # of a timeline


def spans(values: Iterable[int]) -> str:
    """Write numbers as spans: "0", "0-3", "1,5", "1-41 by 2, 42-44"."""
    left, out = sorted(set(values)), []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        run = 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        run = run if step == 1 or run > 2 else 1
        by = f" by {step}" if run > 1 and step > 1 else ""
        out.append(f"{left[0]}-{left[run - 1]}{by}" if run > 1 else str(left[0]))
        left = left[run:]
    return ("," if all(part.isdigit() for part in out) else ", ").join(out)


def alike(stages: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Stages of equal key together, if they are many; each by itself, if few."""
    groups: dict[Hashable, list[int]] = {}
    for stage in stages:
        groups.setdefault(key(stage) if len(stages) > FEW else stage, []).append(stage)
    return list(groups.values())


def extent(values: Iterable[float], show: Callable[[float], str]) -> str:
    """Least and most, as text; one of them where they read alike."""
    found = list(values)
    least, most = show(min(found)), show(max(found))
    return least if least == most else f"{least} to {most}"


def some(stages: int) -> list[int]:
    """The stages whose timeline is drawn: all, or LINES of them, the first and last included."""
    if stages <= LINES:
        return list(range(stages))
    return sorted({round(k * (stages - 1) / (LINES - 1)) for k in range(LINES)})


def one_of_each(notes: Iterable[str], stages: int) -> list[str]:
    """Notes; of those of many stages that differ in numbers alone, the first."""
    if stages <= FEW:
        return list(notes)
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(re.sub(r"\d[\d,]*", "#", note), []).append(note)
    return [
        group[0] + (f" (and {len(group) - 1} notes like it)" if len(group) > 1 else "")
        for group in groups.values()
    ]
