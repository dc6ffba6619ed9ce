"""An op is known by one OpInfo a target, in the file of its family.

registry.py     read this first: target -> OpInfo, rows on a grid, what a rank runs
op_info.py      the fields of an OpInfo; signature.py: rows, rules, local programs; expansion.py
traits.py       views, draws and the like
table.py        rows that an op brings itself: found by experiment, or a user's own
math/ shapes/ nn/ flow/    the families; flow: the engine's own ops
"""
