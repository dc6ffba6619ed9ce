"""A region compiled by Inductor; torch's internals of it are used in inductor.py alone.

compiled.py compile_ahead.py   what there is to compile, and before ranks are forked
graph_breaks.py   where a region is cut so that a kernel does not read what is cut apart
"""
