"""parallel=auto: the layout with which the whole step costs least, found by search.

search_sbp.py              read this first: assign_sbp, the pass for both ways of laying out
options.py locations.py boxings.py   what may be chosen of each op, and what readers ask for
objective.py               what a choice costs: seconds and bytes
trunk.py                   compute that hides communication
cost_network.py make_network.py   the problem as variables and tables over them
search_network.py dual_bound.py      exact elimination, improvement axis by axis, a bound
"""
