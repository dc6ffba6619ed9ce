"""Choose which group of ranks runs each op, and in which chunk.

split_stages.py    read this first: captured -> staged
balance_stages.py chosen_stages.py   a cut whose slowest stage is fastest; a cut that is given
stage_costs.py     what each op of forward costs, with all that follows it
follow_training.py evaluation has the stages and homes of training
"""
