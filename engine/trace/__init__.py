"""A recorded step, and what it says.

Notes of ranks (when an act began and ended) enter; a timeline and tables leave.

trace.py       read this first: acts of all ranks, and what each waited for
step_time.py   where the time of a step went
causes.py      what each act of a rehearsed step waited for; the longest chain
stragglers.py  ranks slower than others that do the same
model_flops.py arithmetic of the model alone, and its share of the device's peak
"""
