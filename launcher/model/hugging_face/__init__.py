"""Models under Hugging Face's names, and as classes of transformers.

counterpart.py      how layers of one of our models stand in the class that computes the same
own_models.py       flowrun's own models -> their counterparts, one function a class
load_folder.py      a folder that somebody else may have written -> a causal language model
convert_models.py   a folder's tensors -> a model of ours; a model of ours -> theirs
"""
