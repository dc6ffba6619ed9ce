"""Chaos: runs are struck at random moments, and judged by how they end and go on.

blows.py          a seed -> what happens to a run, and when
hosts_of_run.py   the processes of a run
verdicts.py       what was seen -> what is wrong
chaos.py          the command
soak.py           the command that looks whether a long run stays as it is
"""
