"""Torch's own layouts: they train the recipe's model, data and loss without flowrun's engine.

peer_rank.py     read this first: the process of one rank, which calls the layout of its kind
setting.py       what every layout starts from
data_parallel.py tensor.py context.py torch_pipelining.py   a Setting -> a function: one step
"""
