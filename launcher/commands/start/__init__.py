"""Commands for somebody who begins.

init_recipe.py     flowrun init: a recipe for a model, by what its forward and its data show
inspect_model.py   what their names stand for
sample_items.py    what items of the data show, and names for their values
guess_task.py      inputs and loss, by what forward returns
json_schema.py     flowrun schema: the keys of a recipe for editors
output_schemas.py  flowrun schema --of COMMAND: what it prints for programs
list_recipes.py    flowrun recipes
check_recipes.py   flowrun check: whether recipes compose, without torch
manifest.py        flowrun manifest: the file that starts a recipe on hosts of a platform
"""
