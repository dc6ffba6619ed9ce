"""The process of a rank.

environment.py has the variables that libraries read.  heap.py keeps the pages that a step frees for
the next one.  call_stack.py keeps loops off the edges of the interpreter's stack.  core.py keeps a
rank on one core where ranks are more than cores, and near its GPU.  give_way.py lets it go
before threads that save.
cpu_share.py says which share of the cores other programs have.
process_memory.py reads how much memory a process takes.
lifetime.py ends it with the process that forked it.  vital_signs.py and stacks.py show a process
that hangs.  outputs.py shows and keeps what processes print.  own_process.py does one piece of work
in a process of its own, and bounds foreign code.
"""
