"""`flowrun bench suite=paper_foreseen`: published figures compared with those foreseen here.

foresee.py       read this first: the story on a page
published.py     conf/published and command line -> tables of published rows
planning.py      one row's recipe -> its plan and rehearsal, without weights or data
figures.py       recipe and rehearsal -> the figure in the unit that was published
score.py         published and foreseen -> errors, rank correlation, and whether bounds hold
show_tables.py plot_tables.py   a table; published against foreseen
"""
