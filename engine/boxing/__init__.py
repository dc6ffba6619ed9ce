"""Boxing leads from the layout that a tensor has to the one that its reader wants.

boxing.py    read this first: (from, to) -> steps on one axis each, with bytes and seconds
crossing.py  the same where producer and reader are on different grids, as between stages
"""
