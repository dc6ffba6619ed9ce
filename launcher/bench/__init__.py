"""`flowrun bench`: the same training through flowrun and through torch's own layouts, in turn.

story.py     all of it, on a page
suite.py     what is compared: conf/suite + command line -> Suite
runs.py      what runs, in which order: Suite -> Runs
process.py   one run: processes of their own -> Sample, or why there is none
order.py     what a rank of a peer is told
peers/       what it does
results.py   Samples -> Lines: medians, ratios pair by pair, bounds
show.py, plot.py    Lines -> a table, bars
"""
