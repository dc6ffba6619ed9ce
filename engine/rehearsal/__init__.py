"""A plan played by its own protocol without tensors: seconds and bytes of a step, foreseen.

rehearsal.py       read this first
clock.py period.py the virtual time of every rank; a period found in it is not played again
link_traffic.py shared_cores.py   messages that share a link, ranks that share cores
"""
