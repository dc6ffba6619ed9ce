"""Words of the command line and YAML -> a Recipe, checked.

compose.py         read this first: Hydra composes, `load` returns a Recipe
schema.py ranges.py checks.py errors.py   keys, their types and ranges, contradictions, refusals
hydra_source.py placement_keys.py hardware_keys.py   recipe files, axes and pins, profiles
locate.py device.py   `_target_` paths; what ranks run on
"""
