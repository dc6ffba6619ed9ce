"""capture_check compares what was captured with the module itself, as torch runs it.

Capture cannot see everything that Python does.  So loss, gradients and buffers of the captured
graph are compared with those of the module, called with autograd: twice, on two micro-batches, with
weights that have changed in between.  Python state that the second call changes again is refused.

compare.py      read this first
interpret.py    a captured graph, op after op, on whole tensors
draws.py        random ops that give both sides the same numbers
state.py        what Python holds where forward writes, as a value that can be compared
"""
