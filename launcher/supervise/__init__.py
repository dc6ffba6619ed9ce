"""A planned job -> processes that train it, kept alive until the end.

life/                read this first: the life of a run, pure: states, events, instructions
driver.py            one event loop that feeds the state machine, and has hands act
hands/               processes, the main thread, signals, states to begin at, the watch
hosts/               several hosts: they meet, and send each other what happens
"""
