"""Rewrites of captured graphs, before any layout: ops that have no table become ops that have one.

strided_views.py masked_writes.py   torch's ops as others
batched.py kept_logits.py   one product for several; what a loss keeps for backward
check_ranges.py  ids and labels are checked before they are looked up
simplify.py      read this first: the list of rewrites in order; removes double transposes,
                 duplicates and dead ops
"""
