"""Families of arithmetic.

pointwise.py    element by element, with broadcasting: read this first
matmul.py grouped.py   matrix products; products of stacked experts
reduce.py       sums, means and maxima along dims
"""
