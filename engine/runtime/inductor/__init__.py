"""Regions compiled by torch's Inductor.

inductor.py      the only file that uses Inductor's internals
compiled.py      read this first: the regions of a plan as compiled programs, equal ones once
compile_ahead.py their code, made on all cores before ranks are forked
graph_breaks.py  where a program is cut because a line is not compiled
"""
