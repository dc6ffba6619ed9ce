"""Families of neural networks.

norm.py batch_norm.py   layer, RMS and group norms; batch norms
attention.py     attention, and that of packed documents; ring_attention.py: of divided lengths
document_op.py   the op of torch for the latter, which models call too
expert_op.py     the ops of torch of experts that leave no token out (experts/)
conv.py embedding.py   convolutions and pooling; look-ups in tables
softmax.py loss.py cross_entropy.py   softmax and losses; chunked_head.py: with the product
"""
