"""A signature for each op, and a home for each weight: pins first, then one axis after the other.

infer_sbp.py       read this first: rows, homes, and the choice on every axis
apply_pins.py      the recipe's pins are checked, and written into the captured graph
homes.py costs.py  where weights may live; what a row and a boxing cost
keep_lengths.py long_attention.py   where an axis divides lengths: unmerged dims; heads or keys
expert_room.py     slots for tokens that travel to the ranks of their experts
axis_search.py elimination.py elimination_order.py   the least sum of rows and boxings on one axis
"""
