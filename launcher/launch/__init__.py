"""A job -> processes, and what they report to the launcher.

local_launch.py virtual_launch.py   read these first: one process a rank, or all ranks in this one
elastic.py           the agent that forks the ranks of this host and ends them
collector.py         what ranks and other hosts report, and who is blamed
worker.py            one rank: what a forked process does from its first line to its exit
preemption.py        signals and launch.time_limit: finish the step, save, end or go on
step_gate.py         which steps ranks may begin, so that all come to rest after the same one
rank_saves.py   what a rank saves: checkpoints while training goes on, and weights
events.py            what a rank reports to its launcher
hosts/               how the launchers of several hosts meet, and what they send each other
restart/             whether and where ranks that died begin again
watch.py             whether the ranks of this host hang, and which one owes what
failure.py finite.py what went wrong, for a person; numbers that are not finite
limits.py            limits of the system, before anything starts
rank_memory.py       the peak memory of a rank
"""
