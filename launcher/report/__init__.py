"""Show a run to a person, and write its files.

The job and its rehearsed plan enter before the run, measured figures after it.

report.py record.py  foreseen figures next to measured ones; the files of a run's folder
show_plan.py notes.py   `flowrun plan`: tables, and what a person should know of a plan
show_level.py        one level of the compiler as text
group_equal.py       equal stages on one line
progress.py          steps as they come, as a bar or as lines
run_environment.py   versions, host and commit of a run
metric_lines.py      reads metrics.jsonl back (record.py writes it)
trace_file.py        trace.json, a timeline of all ranks
sweep_table.py       the table that ends a sweep; bars.py its bars, and those of a bench
"""
