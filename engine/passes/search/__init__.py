"""parallel=auto: the layout with which the whole step costs least, found by search.

search_sbp.py                 read this first: assign_sbp chooses between search and inference
network.py make_network.py    ops and weights as variables with options, boxings as costs between
forms.py options.py rows.py boxings.py objective.py   what may be chosen, and what it costs
starts.py search.py neighbourhoods.py   first choices, exact elimination, improvement
trunk.py weigh.py             a line that many boxings hang on; seconds against bytes
"""
