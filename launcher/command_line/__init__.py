"""The commands as typer declares them: their help and arguments -> one function call, printed.

app.py                the program that they register with, shared arguments, how errors are shown
train_commands.py     run, plan, verify, resume
model_commands.py     export, sample, eval, tokenizer
measure_commands.py   bench, calibrate
start_commands.py     runs, status, top, report, init, schema, manifest, recipes
hydra_jobs.py         composes one job or those of a sweep; slurm.py: queues a job; ray_jobs.py:
                      on Ray, ray_host.py: one of its nodes; seats.py: who of a host's processes
                      launches

The program enters elsewhere (flowrun.launcher.cli), which imports them in the order of its help.
"""
