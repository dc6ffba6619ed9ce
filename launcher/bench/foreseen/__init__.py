"""`flowrun bench suite=paper_foreseen`: figures that others published, beside those foreseen here.

story.py     all of it, on a page
published.py conf/suite, conf/published + command line -> Foreseen: tables of published rows
planning.py  one row's recipe -> its plan and rehearsal; no weights, no data
figures.py   recipe and rehearsal -> the figure in the unit that was published
score.py     published and foreseen -> errors, rank correlation, and whether the bounds hold
show.py, plot.py    a table; published against foreseen
"""
