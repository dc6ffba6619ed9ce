"""Parts of torch that are replaced while a module is captured.

A `with` block enters each patch and restores torch at its end.

tracing.py      read this first: everything that capture enters, and settings of Dynamo
substitutes.py  functions of torch.nn that look at values or mix samples, written otherwise
"""
