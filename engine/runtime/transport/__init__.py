"""Messages and collectives between ranks.

links.py        read this first: the groups of a rank, and the transport of each message
collectives.py  by torch.distributed; shared_memory.py host_peers.py arena.py   ranks of one host
inbox.py pending.py transport.py   what has arrived, what is under way, routes of pieces
shared_weights.py   a weight that ranks of a host hold once
"""
