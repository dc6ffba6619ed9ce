"""Words of the command line and YAML -> a Recipe, checked.

Overrides such as "train.steps=50" enter; a frozen Recipe leaves, or an error with a place.

compose.py         read this first: Hydra composes, `load` returns a Recipe
schema.py          every key: type, default, unit
key_schema.py      the keys as a config of OmegaConf; meanings; nested keys as dotted keys
recipe.py          Recipe, which all of the launcher reads
updates.py         several updates of a step, each a Recipe
value_ranges.py checks.py   the range of a single key; contradictions between keys
hydra_source.py    recipe files as Hydra's group `recipe`
placement_keys.py hardware_keys.py   grids of ranks and pins; hardware profiles
locate.py recipe_errors.py   a key -> file:line:column; what an error says, the nearest key
device.py          whether ranks run here, and on the CPU or on CUDA
"""
