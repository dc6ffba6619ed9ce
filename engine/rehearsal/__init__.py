"""A plan played by its own protocol without tensors: seconds and bytes of a step, foreseen.

rehearsal.py       read this first
clock.py           acts that begin and end; clock_state.py what they change, with one `advance`
draw_step.py       the first step once more, with the bytes of every moment
reserved.py        what torch's allocator reserves
launches.py        why no order of launches stops a run
period.py          what repeats in it, which is not played again
link_traffic.py shared_cores.py   messages that share a link, ranks that share cores
"""
