"""From the layout that a tensor has to the layout that its reader wants.

boxing.py    (from, to) -> steps on one axis each, with bytes and seconds
crossing.py  the same where producer and reader are on unlike placements
"""
