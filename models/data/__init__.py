"""Data sets: map-style, items are dicts of tensors, the same each time.  Nothing is downloaded."""
