"""heap.py: pages that a step frees are kept for the next.  core.py: a rank stays on one core."""
