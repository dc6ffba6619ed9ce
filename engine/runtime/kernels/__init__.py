"""A region of ops as one Python function on tensors.

kernels.py region_program.py   read these first: ops -> source -> function; program.py: one op
overrides.py products.py pixel_convolutions.py fused_attention.py   by other kernels than torch's
out_variants.py row_chunks.py   results over memory that is there; some rows at a time
cuda_graphs.py live_bytes.py   a region played as a CUDA graph; bytes counted by a dispatch mode
"""
