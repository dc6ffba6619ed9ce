"""`flowrun runs`: what lies in the folders of runs.

run_summary.py    finds runs, and says of each how far it is and how it ended
list_runs.py      lists them; what the command was asked for begins here
compare_runs.py   shows a run, or two side by side
follow_run.py     prints the steps of a run as they come
"""
