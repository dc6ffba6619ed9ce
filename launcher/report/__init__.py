"""What is shown and written of a run.

report.py record.py     foreseen beside measured; the files of a run's folder
show.py notes.py group_equal.py   the plan, and what a person should know of it
progress.py trace.py multirun.py  steps as they come, a timeline, the table of a sweep
"""
