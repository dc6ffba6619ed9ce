"""The code that runs inside a rank.

worker.py              read this first: a rank from its first line to its exit
virtual_run.py         all ranks in one process
segment_loop.py        train, evaluate and save as it is due
run_updates.py         several updates of a step
rank_events.py wire.py   what it says to the launcher; as JSON, and on its way
step_gate.py           which step a rank may begin; all rest after the same
finite.py              numbers that are not finite, noticed in their step
rank_saves.py          checkpoints and weights of a rank
snapshots.py           a rank copies its variables to memory that outlives it: snapshot_memory.py
rank_memory.py         what a rank measures of itself
failure.py             what went wrong, for a person
"""
