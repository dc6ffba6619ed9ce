"""Hangs: faults that leave a run hanging are planted, and each must be named.

planted.py   the faults
plant.py     the command
"""
