"""A recipe made concrete: model, data, strategy and plans.  No process is started here.

A Recipe enters; a Job leaves, whose plans are compiled when they are asked for.

job.py               read this first; materials.py what plans are made of; job_plans.py the plans
recipe_strategy.py optimizer.py lr_schedule.py   what the recipe asks of the compiler
segments.py          pieces of a run between events
compiling.py         what ranks do: plans, and kernels: op after op, or compiled
resumed.py           a job that continues from a checkpoint
limits.py faults.py  limits of the system, looked at before; errors that are no user's
plan_cache.py        plans on disk, found by the content that they were made from
forked.py garbage.py   work in a forked process, and what a fork must mind
"""
