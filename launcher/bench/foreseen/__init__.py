"""`flowrun bench suite=paper_foreseen`: published figures compared with those foreseen here.

foresee.py       read this first: the story on a page; a row's plan, without weights or data
published.py     conf/published and command line -> tables of published rows, and their units
score.py         published and foreseen -> errors, rank correlation, and whether bounds hold
show_tables.py   a table; published against foreseen as points
"""
