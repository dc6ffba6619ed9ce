"""Families of arithmetic: matrix products, element by element, reductions."""
