"""Proof: which rows of an op hold, tried on small tensors on simulated ranks.

simulated_ranks.py   one op on every rank of a grid, and the results put together
judge.py             every row there is, against a table (tests/engine/ops, flowrun.testing)
call_form.py         an op apart from its sizes: what an experiment is about
values.py            numbers to try
experiment.py        an op without a table -> the rows that hold
kept_rows.py         rows on disk: found_rows.json, which ships, and a user's own
"""
