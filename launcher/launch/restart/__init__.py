"""Ranks that have died -> new ones, near where those were.

restarts.py    read this first: whether the run goes on, and from which state
rollback.py    the weights of a checkpoint, where numbers are not finite
snapshots.py   copies of the ranks' variables, in memory that outlives them
host_memory.py   what of it this host has
"""
