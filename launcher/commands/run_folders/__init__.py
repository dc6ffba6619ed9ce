"""`flowrun runs`, `status`: what lies in the folders of runs.

run_summary.py    finds runs, and says of each how far it is and how it ended
list_runs.py      lists them, shows one or compares two, follows one: the command begins here
top.py            flowrun top: one, live
answer.py         /metrics and /healthz of a run (supervise/hands/monitor.py starts it); its
                  TextHandler serves pages, too
"""
