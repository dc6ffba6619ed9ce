"""Commands for somebody who begins.

init_recipe.py     flowrun init: a recipe for a model, by what its forward and its data show
inspect_model.py   what a model and its data show when they are tried
json_schema.py     flowrun schema: the keys of a recipe for editors
"""
