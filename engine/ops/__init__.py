"""An op is known by one OpInfo a target, in the file of its family.

registry.py     read this first: target -> OpInfo, rows on a grid, what a rank runs
traits.py       views, draws and the like
math/ shapes/ nn/ experts/ flow/    the families; flow: the engine's own ops
proof/          which rows of an op hold, tried on simulated ranks
"""
