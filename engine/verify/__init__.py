"""Tables of small statements that can be run: what each level of a graph, and a plan, promise.

A pass may rely on the promises of the level that it reads and has to keep those of the level that
it makes.  They are tried after every pass in tests, and in a run under `engine.check=true`.

rules.py            read this first: Rules, Fault, and the error that names the broken promise
graph_rules.py      verify(graph, strategy, made_by): names, order, phases, stages, variables
layout_rules.py     the rules of nd-SBPs: from level laid_out on
plan_rules.py       validate(plan, made_by): actors and their work
register_rules.py   the rules of registers: ends, slots, bytes, no cycle without a token
"""
