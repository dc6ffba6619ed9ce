"""A profile measured on this machine.

calibration.py probes.py op_times.py   what is measured, and how; calibrated.py fits a profile to it
"""
