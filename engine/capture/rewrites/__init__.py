"""Rewrites of captured graphs, before any layout: each makes ops that a table knows of others.

substitutes.py strided.py lookups.py recurrent.py masked.py   ops that torch leaves, as known ones
batched.py kept_logits.py simplify.py   one product for several, what a loss keeps, what is no work
check_ranges.py     ids and labels are looked at, as torch does
"""
