"""Commands other than to train or plan a recipe.

verify.py        trains every layout for a few steps; plain_loop.py is the same in plain torch
resume.py        goes on from a checkpoint, in any layout
export.py        writes a run's weights as one file; export_adapters.py merges adapters
tokenizer_folder.py   trains a tokenizer on text
calibrate.py     measures this machine; calibrate_ops.py the ops of recipes
"""
