"""Who does what, and when it may act: plans and their protocol.  Pure: no tensors, no processes.

plan.py         read this first: Actor, Register, Plan, and the plan as text
protocol.py     the state machine of one actor and its registers
scheduler.py    which ready actor of a rank acts first
schedules.py    1F1B and its relatives: how many micro-batches a stage may hold
communicators.py   groups of ranks that talk to one another
sums.py         where gradients are added up over micro-batches
deadlock.py     the error for a deadlock: who waits for what
standstill.py   which act is owed, by which rank, at a standstill
"""
