"""One rank of a plan: registers, readers, variables, and what its acts call.

rank.py      read this first: Rank.compute runs a region
register_versions.py  versions of a register that are bound to tensors
readers.py   samples, each in a thread; readback.py   numbers that the host waits for
shards.py    pieces of variables that a rank saves
"""
