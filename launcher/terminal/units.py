"""Quantities for a person."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for a person: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds(value: float) -> str:
    """Seconds for a person: 12.3 ms."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def duration(value: float) -> str:
    """A time in whole seconds, minutes or hours for a person: 3 h 12 min."""
    whole = round(value)
    if whole < 100:
        return f"{whole} s"
    minutes = round(value / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 100 else f"{hours / 24:.1f} days"


def ranks(count: int) -> str:
    """Ranks for a person: 1 rank."""
    return f"{count} rank{'' if count == 1 else 's'}"
