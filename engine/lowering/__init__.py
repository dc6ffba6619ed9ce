"""A boxed graph -> a plan; then Plan -> Plan, each pass with a switch of its own.

lower.py        read this first: regions, registers and boxings become actors
form_regions.py merge_chains.py   which ops one actor runs
registers.py throttle.py          how many registers, and who waits
shared_weights.py overwrite.py   one copy for ranks of a host, in place
idle_axes.py    axes along which all ranks do the same
"""
