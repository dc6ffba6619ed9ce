"""A recipe's model, data and loss as objects, before a run.

A Recipe enters; a module without memory for its weights leaves, with initial values that ranks ask
for one at a time.

build.py           read this first: model, data set, loss, metrics of a recipe
targets.py         what a `_target_` names, and its arguments
user_modules.py    which modules of the working directory are found, by whom
adapters.py        LoRA around named linears
deferred.py        records how the constructor makes each weight
replay.py initial.py   make a weight, and hand it out when it is asked for
op_schema.py       what torch declares of an op
pretrained.py      weights read from a file
parallel_plan.py   the pins that a model of transformers carries
packed_inputs.py   packed data in a model, and attention within documents
hugging_face/      our models under Hugging Face's names, there and back
signatures.py      rows that a user gives for ops of their own
dataset_checks.py   whether items, and their ids, are what the recipe needs
"""
