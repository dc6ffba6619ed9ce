"""The only folder with processes, streams and buffers: ranks that run a plan.

process/      the heap and the core of a process
transport/    messages and collectives between ranks
kernels/      a region of ops as one Python function
inductor/     a region built by torch
rank/         one rank: registers, readers, variables, what its ops are called with
drivers/      the loop that runs the actors: real processes, one process for all ranks; a recorder
calibration/  a profile measured on this machine
"""
