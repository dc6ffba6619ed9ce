"""A signature for each op, and a home for each weight: pins first, then one axis after the other.

infer_sbp.py       read this first: rows, homes, and the choice on every axis
pin_activations.py the recipe's pins are checked; in and out pins become ops
homes.py costs.py  where weights may live; what a row and a boxing cost
axis_search.py elimination.py elimination_order.py   the least sum of rows and boxings on one axis
"""
