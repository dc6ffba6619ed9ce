"""The launchers of several hosts find each other, and send each other what happens.

hosts.py             read this first: this launcher's connection to the others, for the whole run
hub_link.py          its connection, and who holds the hub
door.py              what listens on each host; the hub's side of connections
other_folder.py moves.py   files that a host fetches from another; which, and when
hub.py meeting.py    pure: who gets which message; whether two hosts run the same, and their numbers
words.py             what a host and the hub say to each other
channel.py           messages over a socket, between two sides that know one token: token.py
endpoint.py          launch.rdzv_endpoint: its addresses, who listens there; where ranks meet
"""
