"""Parts of torch, and of a model, that are replaced while it is captured.

A `with` block enters each patch and restores torch at its end.

tracing.py      read this first: everything that capture enters, and settings of Dynamo
substitutes.py  functions of torch.nn that look at values or mix samples, written otherwise
routed_experts.py experts of transformers' models, as one op
forward_graph.py what Dynamo's graph reads and calls; recurrent_layers.py: layers as ops
alike_blocks.py blocks of a model that torch does not trace, as it traces others like them
"""
