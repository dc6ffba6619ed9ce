"""The update of weights as ops of the graph: staged -> trained.

update_ops.py      read this first: sums over micro-batches, then the parts below
optimizer_ops.py clip_ops.py scale_loss.py sparse_ops.py   its parts; sparse: rows of tables
torch_update.py    classes of torch.optim as functions that optimizer_ops.py traces
choose_owners.py   which rank updates a matrix that is needed whole
graph_builder.py   collects ops, and puts them in topological order
frozen_steps.py    parameters without an update in the first steps
place_states.py    states in the host's memory, and their copies on the device
shard_optimizer.py ZeRO: new homes for weights, states and sums
"""
