"""What carries out instructions, and sees what happens.

local_ranks.py forks.py   a process a rank, forked from this one
virtual_ranks.py     all ranks in this process
desk.py              what the main thread does for the loop
signals.py           what asks a run to end
newest_state.py      where ranks begin
watch.py             notices when nothing happens
lease.py             one run a folder
"""
