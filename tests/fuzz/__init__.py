"""Fuzz: recipes, command lines and files that most likely are wrong are planned, read and judged.

mutations.py   a seed -> a case
damaged_files.py   a seed -> a place with a damaged file, and the command that reads it
judge.py       status and text -> an outcome
fuzz.py        the command: each case in a fork of one process
"""
