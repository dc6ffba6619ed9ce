"""The profile of a machine: pure numbers, read from conf/hardware.

hardware.py      a device: products, memory, seconds of an op
network.py       links between ranks, and seconds of a collective
measured_ops.py  seconds of single ops, as `flowrun calibrate` measured them
"""
