"""LogicalGraph -> LogicalGraph: the passes that pipeline.py lists.

layout/   pins, a signature for each op, homes of weights
update/   accumulation, clipping, the optimizer and ZeRO as ops
search/   parallel=auto: a layout found by search
stages/   which group of ranks runs each op

Here are those that belong to none of these: mirror.py, find_rows.py, count_step.py, recompute.py,
hoist_weights.py, insert_boxing.py and smaller ones.
"""
