"""The words of the compiler: no passes, no costs.

graph.py        read this first: Op, LogicalTensor, Variable, Feed, LogicalGraph and its levels
sbp.py          Split, Broadcast, Partial; an nd-SBP is one of them for each axis
location.py     a stage and an nd-SBP: where a tensor lies
placement.py    ranks in a grid with named axes, and the slice of a tensor that each holds
names.py        names of tensors that never meet those of a user's model
table.py        rows that an op brings itself: found by experiment, or a user's own
op_info.py      the fields of an OpInfo; signature.py: rows, rules, local programs; expansion.py
files.py        how a file is written where others can touch it; own_files.py: kept between runs
user_code.py    the lines of a traceback that are a user's own
module_path.py  dotted paths of modules, and the repeated block that one is a part of
"""
