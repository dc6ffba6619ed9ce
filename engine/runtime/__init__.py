"""The only folder with processes, streams and buffers: ranks that run a plan.

process/      the heap and the core of a process
transport/    messages and collectives between ranks
kernels/      a region of ops as one Python function
inductor/     a region built by torch
rank/         one rank: registers, readers, variables, what its ops are called with
drivers/      who turns the crank: real processes, one process for all ranks, with a recorder
calibration/  a profile measured on this machine
"""
