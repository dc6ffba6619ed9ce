"""Every test of a run works in an empty directory."""

from support.runs.workplace import workplace

__all__ = ["workplace"]
