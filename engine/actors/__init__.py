"""Who does what, and when it may act: plans and their protocol.  Pure: no tensors, no processes.

plan.py                  Actor, Register, Plan: read this first; draft.py is a plan being made
protocol.py              the state machine of one actor and its registers
scheduler.py schedules.py   which ready actor goes first; 1F1B and its relatives
sums.py deadlock.py      where gradients are added up; what a plan that waits for itself waits for
"""
