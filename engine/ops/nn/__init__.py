"""Families of neural networks: norms, attention, embeddings, convolutions, softmax, losses."""
