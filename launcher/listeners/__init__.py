"""Follow a run: the loggers of the key `log`, and the callbacks of the key `callbacks`.

Both are listeners (listener.py, read it first: the events, and the table of what a step has).
make.py makes those that a recipe names.  dispatch.py: threads and queues that call them, in the
launcher of the first host, so that a listener knows nothing of ranks.  trackers.py writes to
other libraries.  early_stopping.py is a callback that ships.
"""
