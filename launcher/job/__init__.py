"""A recipe made concrete: model, data, strategy and plans.  No process is started here.

job.py            read this first
strategy.py optimizer.py lr_schedule.py   what the recipe asks of the compiler
sampler.py segments.py   samples of a step; steps from one event to the next
compiling.py plan_cache.py digest.py   kernels, and plans that are kept by what they were made of
forked.py garbage.py open_files.py   work in a forked process
"""
