"""Find out which rows of an op hold, on small tensors on simulated ranks.

An op with samples enters; rows for one axis leave.

simulated_ranks.py   one op on every rank of a grid; layouts in which the results are the whole
experiment.py        read this first: an op without a table -> the rows that hold
call_form.py         an op without its sizes: what an experiment is about
values.py in_child.py  numbers that a wrong row does not survive; experiments in a child process
kept_rows.py         rows on disk: found_rows.json, which ships, and a user's own
"""
