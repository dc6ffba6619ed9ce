"""The compiler and the runtime: a captured model and a strategy -> a plan -> ranks that run it.

compile.py has the story on a page; pipeline.py lists the passes.  A folder imports only folders
above it in this list (tests/test_tree.py):

errors.py           what is wrong and where
torch_internals.py  each name of torch that is not public and is relied on
ir/                 words: SBP, placements, the logical graph, module paths; files
ops/ hardware/      one OpInfo for each op, and rows tried; a device and its links as numbers
boxing/ strategy.py from one layout to another; what a recipe asks for
actors/             the plan and the protocol of its actors
capture/ cost/      a module -> a logical graph; bytes and seconds of a plan
passes/             LogicalGraph -> LogicalGraph: stages, update, layout, search, boxings
verify/             what each level of a graph, or a plan, promises
lowering/ rehearsal/ trace/   graph -> plan; a plan without tensors; a recorded step
runtime/            the only folder with processes, streams and buffers
"""
