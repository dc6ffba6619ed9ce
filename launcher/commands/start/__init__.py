"""Commands for somebody who begins.

foreign_config.py  flowrun import: keys of DeepSpeed's and accelerate's files as a recipe
"""
