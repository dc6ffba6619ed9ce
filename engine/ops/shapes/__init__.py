"""Families that move, pick or make elements and compute nothing: views, slices, indices, constants.

shape.py: views and transposes; slice_cat.py: pieces along a dim; index.py: at positions that a
tensor says; strided.py; create.py: out of nothing.
"""
