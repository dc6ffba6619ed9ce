"""Experts that leave no token out (nn/expert_op.py: the op of torch, which models call, too).

dropless.py   rows, local programs and cost
routed.py     tokens that travel to the ranks of their experts, and back
"""
