"""The compiler and the runtime: a captured model and a strategy -> a plan -> ranks that run it.

compile.py has the story, pipeline.py the passes, plan_updates.py several updates
of a step.  Imports point up this list (tests/test_tree.py):

errors.py           what is wrong and where
torch_internals.py  each name of torch that is not public and is relied on
ir/                 words: SBP, placements, the logical graph, module paths; files
hardware/           a device and its links as numbers
ops/                one OpInfo for each op, and rows tried
boxing/             from one layout to another
strategy.py         what a recipe asks for
actors/             the plan and the protocol of its actors
capture/            a module -> a logical graph
cost/               bytes and seconds of a plan
passes/             LogicalGraph -> LogicalGraph: stages, update, layout, search, boxings
verify/             what each level of a graph, or a plan, promises
lowering/           graph -> plan
rehearsal/          a plan without tensors
trace/              a recorded step
runtime/            the only folder with processes, streams and buffers
"""
