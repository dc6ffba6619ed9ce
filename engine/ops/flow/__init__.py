"""The engine's own ops, `flow.*`, that torch does not know: functions, and what is known of them.

update.py sparse.py scaling.py    the update: sums, optimizers, embedding tables, loss scale
random.py rounding.py             draws; bf16 rounded at random
ranges.py check.py                checks of ids; asserts of the model
recurrent.py                      layers of LSTM, GRU and RNN, also ops of torch
structure.py                      what passes put between ops: boxings, pins, mirrored view
"""
