"""Who turns the crank of a plan.

distributed.py   one rank in a process of its own: acts as registers allow, messages to the others
virtual.py       all ranks in this process, one after the other
communication.py   what a rank sends and receives; metering.py   live bytes in its first steps
recorder.py      with a record of every act; checkpoint.py   state to disk and back
"""
