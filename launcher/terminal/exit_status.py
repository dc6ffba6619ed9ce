"""Exit statuses of commands."""

OK, RUN_FAILED = 0, 1
RECIPE_WRONG = 2  # or the command: nothing was started
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a run was asked to end; the same command continues it
INTERRUPTED = 130  # by Ctrl-C
