"""A rank of a plan: its registers, readers, variables, and what its acts call.

rank.py      read this first: Rank.compute runs a region
register_versions.py   where the tensors lie that an actor reads and makes
dry_acts.py  on CUDA each region once, before anything is sent
readers.py   batches, each reader in a thread
readback.py  copies between host and device without waiting
shards.py    pieces of variables that a rank saves; shard_file.py: a safetensors file of them
replicas.py  pieces that several ranks must hold alike, and which rank does not
"""
