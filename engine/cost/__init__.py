"""Bytes and seconds of a plan, from shapes and a hardware profile.  Pure.

op_cost.py seconds.py actor_cost.py fusion.py   of an op, on a rank, of an actor or a kernel
footprint.py live.py stored.py first_fit.py     memory of a rank, and what backward needs of forward
staging.py messages.py                          what collectives hold; the messages of a step
"""
