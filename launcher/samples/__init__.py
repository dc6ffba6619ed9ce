"""Which samples a step reads, and the processes that make them.

sampler.py           read this first: (step, micro-batch, rows) -> a batch
data_workers.py      processes that make a rank's batches ahead of it
open_files.py        files that a forked process reads at a position of its own
"""
