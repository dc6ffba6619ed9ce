"""auto.placement: the fastest recipe that a number of ranks and their memory allow.

    recipe -> Space of candidates -> bounds -> plans of the best -> outcomes -> a recipe

place.py               read this first
space.py bound.py      which candidates there are; the least that each takes
repeated_blocks.py branch_bounds.py   models of many equal blocks: parts, bounds
extrapolate.py reduced_depth.py        their candidates, by plans of few blocks
captures.py planner.py graphs that are captured once; a candidate's plan and rehearsal
placement_search.py outcome.py   branch and bound; what is known of a candidate
show_placements.py saved.py   the ten best and why each lost; the winner as a recipe file
settle.py              a recipe as it will run, and the rest of a run on other ranks

docs/how_to/placement_search.md explains the search to a user.
"""
