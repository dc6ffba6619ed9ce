"""The callback of a sweep, by the name that conf/config.yaml and users' own configs give it."""

from __future__ import annotations

from flowrun.launcher.report.sweep_table import Comparison

__all__ = ["Comparison"]
