"""The launchers of several hosts find each other, and send each other what happens.

hosts.py             read this first: this launcher's connection to the others, for the whole run
alone.py             a run of one host, and the words that both kinds share
hub_server.py        the hub's side of all connections
hub.py meeting.py    pure: who gets which message; whether two hosts run the same, and their numbers
holdings.py          pure: which step the hosts hold between them after a loss, and who saves it
patience.py          how long others are awaited; a line every few seconds
channel.py           JSON messages over a socket, between two sides that know one token
endpoint.py          launch.rdzv_endpoint: its addresses, who listens there, on which interface
rendezvous.py        where the ranks of a run meet, for the agent of torch.distributed.elastic
"""
