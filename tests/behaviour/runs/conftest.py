"""Every test of a run works in an empty directory."""

from support.runs.workplace import end, place, workplace

__all__ = ["end", "place", "workplace"]
