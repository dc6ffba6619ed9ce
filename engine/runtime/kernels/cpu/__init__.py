"""Kernels that run in place of torch's where ranks compute on a CPU.

cpu_kernels.py         read this first: torch's op -> the kernel in its place, if this processor
                       gains by it
products.py            matrix products by oneDNN, where MKL leaves vector units idle
pixel_convolutions.py  convolutions of one pixel, as products
row_chunks.py          two ops on logits, some rows at a time

No other device runs them.  Without them numbers are the same to a rounding, and a step of a GPT
takes 10 to 50 % longer on AMD.
"""
