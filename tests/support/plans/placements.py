"""A GPT that is small enough to be placed in a test."""

SMALL = [
    "recipe=gpt_tp",
    "model.depth=2",
    "model.width=128",
    "model.heads=2",
    "train.batch_size=8",
    "engine.cache=false",
    "eval.batches=0",
    "auto.placement=true",
    "auto.keep=[placement.in_flight]",
]
