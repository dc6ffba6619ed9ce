"""The update of weights as ops of the graph: sums, clipping, loss scaling, the optimizer, ZeRO.

update_ops.py   read this first; graph_builder.py adds the ops
optimizer_ops.py clip_ops.py scale_loss.py sparse_ops.py   its parts
shard_optimizer.py   ZeRO: new homes for weights and states
"""
