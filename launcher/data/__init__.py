"""Data sets, and which samples a step reads.  Nothing is downloaded.

Data sets are map-style; items are dicts of tensors, the same each time.

sampler.py       read this first: (step, micro-batch, rows) -> a batch
stacked.py steps.py collate.py   many items at once; items made in steps; items -> a batch
data_workers.py  processes that make a rank's batches ahead of it
open_files.py    files that a forked process reads at a position of its own
digits.py images.py clusters.py   images: inside wheels, of users, generated
transforms.py    transforms of images, drawn by a seed
clicks.py huggingface.py   click logs; saved Hugging Face data sets
mixture.py named.py   a weighted mixture of data sets; names for items that are tuples
corpus/          text as ids, in windows or as documents
"""
