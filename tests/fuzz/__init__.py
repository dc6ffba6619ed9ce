"""Fuzz: recipes and command lines that most likely are wrong are planned and judged.

mutations.py   a seed -> a case
judge.py       status and text -> an outcome
fuzz.py        the command: each case in a fork of one process
"""
