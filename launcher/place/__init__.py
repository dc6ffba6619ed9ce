"""auto.placement: the fastest recipe that a number of ranks and their memory allow.

    recipe -> Space of Candidates -> Bounds -> search: plans of the best -> Outcomes -> a recipe

story.py is the whole of it; docs/how_to/placement_search.md explains it to a user.
"""
