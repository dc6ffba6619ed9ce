"""A region of ops as one Python function on tensors.

kernels.py region_program.py   read these first: ops -> source -> function; program.py: one op
overrides.py cpu/   by other kernels than torch's; cpu/: those for CPUs
fused_attention.py packed_attention.py   attention by device, and that of packed documents
out_variants.py   results over memory that is there
live_bytes.py   bytes counted by a dispatch mode
nonfinite.py   where numbers that are not finite arise, when a step is repeated
"""
