"""Executors: they do what the state machine asks, and see what happens.

event_loop.py        events, timers and tasks of the loop
ranks_hand.py        ranks, whatever they are; all of them in this process
local_ranks.py       launch=local: forks the rank processes of a round, watches and kills them
desk.py              what the main thread does for the loop
signals.py           what asks a run to end
newest_state.py      where ranks begin
folder.py            the run's folder, as rounds begin and end
watch.py             detects hangs; the text is in engine/actors/standstill.py
lease.py             one run a folder
monitor.py           launch.monitor: a process that answers questions about the run
"""
