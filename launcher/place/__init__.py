"""auto.placement: the fastest recipe that a number of ranks and their memory allow.

    recipe -> Space of candidates -> bounds -> plans of the best -> outcomes -> a recipe

place.py               read this first
space.py bound.py      which candidates there are; the least that each takes
resize.py              a graph of other samples
repeated_blocks.py     parts of a model of many equal blocks, and graphs that are captured once
extrapolate.py reduced_depth.py   candidates of such models, by plans of few blocks
planner.py             a candidate's plan and rehearsal
placement_search.py outcome.py   branch and bound; what is known of a candidate
show_placements.py saved.py   the ten best and why each lost; the winner as a recipe file
settle.py              a recipe as it will run, and the rest of a run on other ranks

docs/how_to/placement_search.md explains the search to a user.
"""
