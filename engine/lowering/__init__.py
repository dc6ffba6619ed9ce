"""A boxed graph -> a plan, by the plan passes that engine/pipeline.py lists.

lower.py          read this first: a plan without actors, its reports and costs
add_regions.py merge_chains.py    which ops one actor runs
add_readers.py add_boxings.py     actors that read batches; collectives and messages, in buckets
share_weights.py  which gathers of weights move no byte on a host
add_registers.py  registers between actors, their slots, and what is held back
reuse_buffers.py  which results are written over what nobody reads any more
idle_axes.py      axes along which all ranks do the same
"""
