"""Read and write what a run leaves on disk.

checkpoint.py    folders of checkpoints, complete or absent; read this first
weight_files.py  weights.safetensors and its like: the state_dict of the trained model
kept_run.py      a run's folder, kept at a URL
fetched_run.py   such a run, fetched to a folder
run_tokenizer.py   the tokenizer of a run, copied to its folder
run_files.py     the names of a run's files
tensor_file.py   a safetensors file that several processes write, region by region
"""
