"""Ranks that have died -> new ones, near where those were.

restarts.py    read this first: whether the run goes on, and from which state
rollback.py    the weights of a checkpoint, where numbers are not finite
snapshots.py   a rank copies its variables to memory that outlives it: snapshot_memory.py; which
               step lies there: stamps.py
neighbour_copies.py   the launchers of several hosts send each other what lies there
aims.py        pure: which step all of them copy next, and which they keep
host_memory.py   what of it this host has
"""
