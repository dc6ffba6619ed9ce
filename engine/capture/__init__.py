"""A module and a batch -> the logical graph of one micro-batch, forward and backward.

capture.py          Task in, LogicalGraph out: read this first; it calls torch
joint_graph.py joint_nodes.py node_reader.py   torch's graph -> ours
capture_errors.py module_checks.py side_effects.py   what is refused, in the user's words
fold.py unfold.py parts.py      equal blocks are captured once, and repeated
buffers.py random_ops.py gradient_hooks.py update_trace.py   writes, draws, hooks, optimizers
patches/            parts of torch and of a model that are replaced while it traces
in_python/          the second way, where Dynamo cannot follow: Python runs forward, watched
rewrites/           passes on what was captured, before any layout
check/              is what was captured what the module computes?
"""
