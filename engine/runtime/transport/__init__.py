"""Messages and collectives between ranks.

links.py        read this first: the groups of a rank, and the transport of each message
transport.py    messages cut, packed, joined and summed; all ranks in one process
collectives.py  by torch.distributed
shared_memory.py host_peers.py arena.py   between ranks of one host, in memory that all read
shared_weight_memory.py   a weight that the ranks of a host hold once
inbox.py pending.py   what a rank sleeps on; communication under way
"""
