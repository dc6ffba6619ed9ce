"""Which group of ranks runs each op, and which chunk of its stage.

split_stages.py    read this first
balance_stages.py chosen_stages.py   a cut with the least busiest stage; a cut that a recipe lists
stage_costs.py     what a piece of forward costs
"""
