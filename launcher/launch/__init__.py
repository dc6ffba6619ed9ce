"""A job -> processes, and what they tell.

elastic.py virtual.py   read these first: one process a rank, or all ranks in this one
worker.py one_host.py hosts.py   a rank; how ranks of one host, and several hosts, meet
failure.py finite.py    what went wrong; numbers that are not finite
rank_memory.py process_memory.py   peaks of a rank and of its process
"""
