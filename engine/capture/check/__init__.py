"""capture_check: is what was captured what the module computes?  Torch itself is asked.

Capture cannot see everything that Python does.  So loss, gradients and buffers of the captured
graph, run op after op, are compared with those of the module, called with autograd: twice, on two
micro-batches, with weights that have changed in between.  What a call changes in Python is looked
at, too: what the second call changes again would have gone on changing.
"""
