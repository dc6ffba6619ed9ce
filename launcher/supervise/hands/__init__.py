"""What carries out instructions, and sees what happens.

event_loop.py        events, timers and tasks of the loop
ranks_hand.py        ranks, whatever they are
local_ranks.py forks.py   a process a rank, forked from this one
virtual_ranks.py     all ranks in this process
desk.py              what the main thread does for the loop
signals.py           what asks a run to end
newest_state.py      where ranks begin
folder.py            the run's folder, as rounds begin and end
watch.py             notices when nothing happens
lease.py             one run a folder
"""
