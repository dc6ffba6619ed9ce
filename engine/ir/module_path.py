"""Dotted paths of modules ("blocks.3.attn.qkv"), and the block of the model that each is in."""

from __future__ import annotations


def unit_of(path: str) -> str:
    """Return the block of a module: its path up to the first index, or the last of several indices
    in a row; without an index, its first name.
    """
    parts = path.split(".")
    numbers = [k for k, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return parts[0]
    last = next(k for k in numbers if k + 1 not in numbers)
    return ".".join(parts[: last + 1])


def block_of(path: str, blocks: str) -> int | None:
    """Number of the block in which a module lies, of those in one list; None outside of the list.

    blocks: path of the list, "" = the model itself.
    """
    inside = path.removeprefix(f"{blocks}.") if blocks else path
    if blocks and inside == path:
        return None
    number = inside.partition(".")[0]
    return int(number) if number.isdigit() else None


def within(path: str) -> list[str]:
    """All modules that a module is inside of, outermost first, and itself."""
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]
