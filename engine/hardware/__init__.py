"""The profile of a machine: pure numbers, read from conf/hardware.

hardware.py      read this first: a device with its products, memory and seconds of an op
network.py       levels of links, and what a group of ranks has of them
measured_ops.py  how far ops that were timed are from the formula
"""
