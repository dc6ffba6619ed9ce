"""Messages and collectives between ranks.

links.py        read this first: which transport carries what; pending.py: what each promises
transport.py    messages cut, packed, joined and summed; all ranks in one process
collectives.py  by torch.distributed
shared_memory.py host_peers.py arena.py   between ranks of one host, in memory that all read
shared_weight_memory.py   a weight that the ranks of a host hold once
inbox.py        what a rank sleeps on
"""
