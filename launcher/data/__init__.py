"""Data sets, and which samples a step reads.  Nothing is downloaded.

Data sets are map-style; items are dicts of tensors, the same each time.

sampler.py       read this first: (step, micro-batch, rows) -> a batch;
                 engine/runtime/rank/readers.py asks for the rank's rows; models/sampling.py has
                 the order of an epoch
stacked.py       many items at once
steps.py         items made in steps
collate.py       items -> a batch
data_workers.py  processes that make a rank's batches ahead of it
open_files.py    reopen_files(): a forked process gets its own file offset
digits.py        images inside wheels
images.py        images of users
clusters.py      generated images
transforms.py    transforms of images, drawn by a seed
clicks.py        click logs
huggingface.py   saved Hugging Face data sets
mixture.py       a weighted mixture of data sets
named.py         names for items that are tuples
corpus/          text as ids, in windows or as documents; rows of files
"""
