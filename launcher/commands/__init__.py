"""Commands other than to train or plan a recipe.

plan_recipe.py   shows what a recipe will do, without doing it
verify.py        trains every layout for a few steps; plain_loop.py is the same in plain torch
resume.py        goes on from a checkpoint, in any layout
export.py        writes a run's weights as one file; export_adapters.py merges adapters
tokenizer_folder.py   trains a tokenizer on text
load_run.py      the weights of a run on the disk; its recipe and model with them
export_folder.py      writes a run as a folder of Hugging Face's
write_text.py    writes text with a model that was trained on it
evaluate.py      computes the metrics of a run, without training
run_folders/     lists runs, compares two, follows one, answers /metrics
try_recipe.py    plans a recipe and trains a step of it
start/           for somebody who begins
calibrate.py     measures this machine, and the ops of recipes
"""
