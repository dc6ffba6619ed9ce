"""The loop of a rank: it asks the scheduler what to do, and does it.

distributed.py   read this first: one rank in a process of its own
virtual.py       all ranks in one process, one after the other
communication.py what a rank sends and receives
pulse.py         counts of begun and done acts, which the launcher reads
recorder.py      both drivers with a record of every act
logical_checkpoint.py   checkpoints on disk, in logical names
"""
