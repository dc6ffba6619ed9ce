"""LogicalGraph -> LogicalGraph: the passes that engine/pipeline.py lists.

layout/   pins, a signature for each op, homes of weights
update/   accumulation, clipping, the optimizer and ZeRO as ops
search/   parallel=auto: a layout found by search
stages/   which group of ranks runs each op

Passes that belong to none of these are here, in the order of the list:
find_rows.py narrow_gradients.py mirrored_view.py   rows of unknown ops; dtypes; each rank its batch
sum_tied_gradients.py split_weight_grads.py   tied weights; order
count_step.py count_kinds.py   divisors of losses over the step; what is made of the batch alone
recompute.py count_targets.py hoist_weights.py   checkpointing; counts; once-a-step work
keep_narrow.py       weights kept in bf16
insert_boxing.py     communication where layouts meet
"""
