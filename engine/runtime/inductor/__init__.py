"""Regions built by torch's Inductor.

inductor.py      the only file that uses Inductor's internals
built.py      read this first: the regions of a plan as built programs, equal ones once
build_ahead.py their code, made on all cores before ranks are forked
graph_breaks.py  where a program is cut because a line is not built
"""
