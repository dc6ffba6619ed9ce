"""What was recorded of a step, and what it says.

trace.py       acts of all ranks as a timeline
step_time.py   where the time of a step went
model_flops.py products of the model alone
"""
