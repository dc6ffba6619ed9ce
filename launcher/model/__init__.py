"""A recipe's model, data and loss as objects, and what is known of them before a run.

build.py                read this first
deferred.py replay.py initial.py   a model without memory, whose values are made when asked for
op_schema.py signatures.py   ops as torch declares them; rows that the user gives
pretrained.py dataset_checks.py   weights by a file; items of a data set
"""
