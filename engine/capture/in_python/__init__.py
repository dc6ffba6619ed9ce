"""in_python: the second way to capture, where Dynamo cannot follow forward.

Python runs forward as it is, on tensors without values, and AOTAutograd records the ops.  Whatever
Python reads that no graph holds would be frozen, so the run is watched, and refused by name.

run_in_python.py  read this first: a module in, torch's joint graph out
watched_calls.py  what forward does in each call, and what it may not do
banned.py         functions that forward may not call
known_values.py   what Python may ask for, as it is the same in every step
frozen.py         what an object of Python holds, as a value that can be compared
branches.py       an `if` on a value whose other side only raises: an assert
"""
