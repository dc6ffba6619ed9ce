"""What torch's own layouts do with a recipe: its model, data, loss and numbers, and nothing of
flowrun's engine.  rank.py is the process; every other file is a layout, a function of a Setting
that returns a Step.
"""
