"""Commands for somebody who begins.

init_recipe.py     flowrun init: a recipe for a model, by what its forward and its data show
foreign_config.py  flowrun import: keys of DeepSpeed's and accelerate's files as a recipe
"""
