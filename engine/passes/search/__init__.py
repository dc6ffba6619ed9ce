"""parallel=auto: the layout with which the whole step costs least, found by search.

search_sbp.py              read this first: assign_sbp chooses between search and inference
options.py locations.py boxings.py   what may be chosen of each op, and what readers ask for
objective.py trunk.py      what a choice costs: seconds, seconds that compute hides, bytes
cost_network.py make_network.py   the problem as variables and tables over them
search_network.py          exact elimination, improvement axis by axis, a bound
"""
