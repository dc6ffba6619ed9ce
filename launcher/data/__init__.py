"""Data sets: map-style, items are dicts of tensors, the same each time.  Nothing is downloaded.

text.py tokens.py windows.py masked.py   streams of ids cut into windows; hidden tokens
digits.py photographs.py images.py clusters.py   images: inside wheels, of users, generated
transforms.py   transforms of images, drawn by a seed
click_log.py huggingface.py   users' tables; saved Hugging Face data sets
corpus/   text as the ids of a tokenizer
mixture.py named.py   a weighted mixture of data sets; names for items that are tuples
collate.py stacked.py steps.py   items -> a batch; many items at once; items made in steps
"""
