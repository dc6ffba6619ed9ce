"""Every test of a run works in an empty directory."""

from support.runs.workplace import place, workplace

__all__ = ["place", "workplace"]
