"""`flowrun bench`: the same training through flowrun and through torch's own layouts, in turn.

bench.py         read this first: the story on a page
load_suite.py suite.py   conf/suite and command line -> Suite -> the runs, in order
process.py       one run in processes of its own -> a sample, or the reason why there is none
peers/           torch's own layouts
results.py       samples -> medians, ratios pair by pair, bounds
show_results.py  a table; bars
sweep.py         every layout of a set, and the one that auto.placement picks, as experiments
foreseen/        published tables compared with foreseen figures
"""
