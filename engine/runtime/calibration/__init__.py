"""A hardware profile measured on this machine.

calibration.py   read this first: what the device and the links do, measured as a run uses them
probes.py op_times.py   single ops to time; ops of a plan timed where they run
calibrated.py    measurements -> a profile
quick_probe.py   speeds as parts of a profile's, measured in a second
"""
