"""The words of the compiler: no passes, no costs, no torch ops.

sbp.py          Split, Broadcast, Partial; an nd-SBP is one of them for each axis
placement.py    ranks in a grid with named axes
graph.py        Op, Tensor, Variable, Feed, LogicalGraph: read this first
names.py        names of tensors that never meet those of a user's model
module_path.py  dotted paths of modules, and the repeated block that one is a part of
"""
