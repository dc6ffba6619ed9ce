"""LogicalGraph -> LogicalGraph: the passes that engine/pipeline.py lists.

layout/   pins, a signature for each op, homes of weights
update/   accumulation, clipping, the optimizer and ZeRO as ops
search/   parallel=auto: a layout found by search
stages/   which group of ranks runs each op

Passes that belong to none of these are here, in the order of the list:
find_rows.py         rows of unknown ops
narrow_gradients.py  gradients in the dtype that they were computed in
mirrored_view.py     each rank its own batch
keep_narrow.py       weights kept in bf16
sum_tied_gradients.py   gradients of a weight that several stages read
count_step.py        divisors of losses, counted over the whole step
count_kinds.py       what is made of the batch alone; for count_step.py
split_weight_grads.py   weight gradients that may run late
head_products.py     head and loss in chunks of rows; products that see aligned rows
recompute.py         activation checkpointing
count_targets.py     targets counted as soon as they are read
hoist_weights.py     what is made of weights alone, once a step
insert_boxing.py     communication where layouts meet
"""
