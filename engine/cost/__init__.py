"""Bytes and seconds of a plan, from shapes and a hardware profile.  Pure.

op_cost.py expansion_cost.py actor_cost.py   seconds of an op, of what it becomes, of an act
fusion.py        what built regions save
footprint.py live.py   bytes of a rank: storage by storage, act by act
stored.py        what recomputation saves and repeats
staging.py messages.py first_fit.py   bytes that communication holds, and where they lie
"""
