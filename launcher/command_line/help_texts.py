"""Texts that `flowrun COMMAND --help` prints above the options; [bold] is markup of rich."""

from __future__ import annotations

RUN_HELP = """Train a recipe.  `run` may be left out.

[bold]recipe=NAME[/] or [bold]recipe=path/to/file.yaml[/] names what to train; every other argument
changes a key of it:

  flowrun recipe=gpt_hybrid
  flowrun recipe=gpt_hybrid placement.axes.data=2 train.steps=50
  flowrun recipe=gpt_dp model=gpt_small model.depth=6 optim.lr=1e-3 launch=virtual
  flowrun recipe=gpt_tp sbp.head.weight.tensor=B
  flowrun -m recipe=gpt_dp,gpt_tp train.batch_size=16,32

[bold]--cfg job[/] shows all keys and their values.  A run's folder is outputs/DATE/TIME_NAME
(change it: hydra.run.dir=…). On several hosts, the same command on each, with launch.nnodes=2
launch.rdzv_endpoint=HOST:PORT.

Ctrl-C or SIGTERM finishes the step, saves a checkpoint and ends; a second one ends at once.  With
train.resume=auto and hydra.run.dir=FOLDER the same command goes on from there.  Exit status: 0 the
run is complete, 1 it failed, 2 the recipe was refused, 75 SIGTERM or launch.time_limit, 130 Ctrl-C.
"""
PLAN_HELP = """Show the plan of a recipe, without starting anything.

Layers with SBP, stage and shapes; each boxing with its bytes; memory of each rank; step time and
bubble foreseen; the timeline.

  flowrun plan recipe=gpt_hybrid placement.stages=4

With auto.placement=true the best placements of its ranks come first; --save-recipe writes the
recipe of the best one.

  flowrun plan recipe=gpt_hybrid auto.placement=true --save-recipe recipes/placed.yaml

--level prints one level of the compiler: recipe, captured, staged, trained, laid_out, signed,
boxed, regions, actors, registers, buffers or order.

  flowrun plan recipe=mlp_hybrid --level boxed
"""
VERIFY_HELP = """Check that a recipe trains alike under every layout.

A few steps under single, data, tensor, stages, hybrid and ZeRO layouts, then one table of loss and
weight differences.  On the virtual cluster; launch=local uses processes.

  flowrun verify recipe=gpt_hybrid train.steps=5
"""
RESUME_HELP = """Go on with a run from its last checkpoint, in its folder.

A run saves checkpoints with train.save_every=N.  Changes of placement, zero, sbp, launch, optim and
of train.steps are welcome; model, data, seed and batch size stay.

  flowrun resume outputs/2026-01-31/12-00-00_gpt_tiny
  flowrun resume RUN_DIR train.steps=400 placement.axes.tensor=1 zero.stage=0
  flowrun resume RUN_DIR --best
"""
EXPORT_HELP = """Write the weights of a run, from any layout.

One safetensors file has the names of the model's state_dict: plain torch and transformers load it,
and so does model.weights of another recipe.  Adapters are merged into the weights, or written
alone.

  flowrun export outputs/2026-01-31/12-00-00_gpt_tiny --to gpt.safetensors
  flowrun export RUN_DIR --step 200
  flowrun export RUN_DIR --adapters

--format hf writes a folder that transformers' from_pretrained loads, with config and tokenizer: of
its own models, and of flowrun's GPT, Llama and BERT.

  flowrun export RUN_DIR --format hf --to my_model/ --dtype bf16
"""
TOKENIZER_HELP = """Train a byte-level BPE tokenizer on text files.

--to is the folder that it writes, which data.tokenizer takes, and AutoTokenizer.from_pretrained of
transformers: with an end-of-text token and a chat template.  Without --from it reads the source of
Python's standard library, as data=text does.

  flowrun tokenizer --from corpus/ notes.txt --vocabulary 8192 --to bpe/
  flowrun recipe=gpt_hybrid data.tokenizer=bpe/ model.vocabulary=8192
"""
SAMPLE_HELP = """Write text with a model that was trained on it.

FOLDER is that of a run, of one of its checkpoints, or a folder of Hugging Face's.  A run's ids are
bytes, or those of its data.tokenizer; of other ids, --tokenizer says what they are.

  flowrun sample outputs/2026-01-31/12-00-00_gpt_tiny --prompt "def "
  flowrun sample RUN_DIR --step 200 --temperature 0 --tokens 40
  flowrun sample path/to/llama --prompt "Once upon a time" --top-k 50
  flowrun sample path/to/llama --chat
"""
EVAL_HELP = """Evaluate a run on its held-out samples, without training.

The loss and the metrics of its recipe, by plain torch on one process: with the newest weights, or
those of a checkpoint.  Keys of the recipe may be changed: more samples, other data, other metrics.

  flowrun eval outputs/2026-01-31/12-00-00_gpt_tiny
  flowrun eval RUN_DIR --step 200 eval.batches=100
  flowrun eval RUN_DIR data.path=other.txt eval.fraction=0.9
"""
BENCH_HELP = """Train by flowrun and by torch's own layouts, in turn, and compare.

[bold]suite=NAME[/] names what is compared (peers, paper …), [bold]suite.key=value[/] changes how;
every other argument changes the recipes, of flowrun and of the peers.

  flowrun bench suite=peers
  flowrun bench suite=peers suite.rows=\\[zero3,tensor] suite.rounds=5
  flowrun bench suite=auto suite.rows=\\[gpt_small] suite.sweep.ranks=\\[2]
  flowrun bench suite=peers precision.dtype=bf16 suite.loss_tolerance=2e-2
"""
FIRST_STEPS = """flowrun trains any PyTorch model in any mix of parallelism, from one YAML recipe.

  flowrun recipe=gpt_hybrid        a first run: four ranks, one minute
  flowrun plan recipe=gpt_hybrid   what a run would do; starts nothing
  flowrun recipes                  the recipes that there are
  flowrun init my_models.Net       a recipe for a model of yours, or a folder of Hugging Face's
  flowrun runs                     the runs that there are
  flowrun --help                   all commands
"""
INIT_HELP = """Write a commented recipe for a model, by what its forward and its data show.

The model is a class, a function, or a module or file that defines one; or a folder of Hugging
Face's.  Fields of the data become arguments of forward, by their names, and the loss is one for
what the field after them holds.  What cannot be known stands as ??? in the recipe.

  flowrun init my_models.Net
  flowrun init my_models.Net data.folder=images/ model.width=64
  flowrun init my_models.py --data my_data.Images --to recipes/mine.yaml --force
  flowrun init path/to/llama
"""
SCHEMA_HELP = """Write the keys of a recipe as JSON Schema, for editors.

An editor with a YAML language server then completes keys, shows what they mean and marks what is
wrong.

  flowrun schema --to recipe.schema.json
"""
RUNS_HELP = """List the runs of a folder; without one those of outputs, multirun and runs.

Each with its steps, loss and status: running, complete, preempted, stopped, failed, or died (it was
killed).  One run's folder shows its figures; two are compared: the keys that differ, and figures.
--follow shows the steps of a run as they come, until it ends.

  flowrun runs
  flowrun runs outputs/2026-01-31/12-00-00_gpt_tiny outputs/2026-01-31/13-00-00_gpt_tiny
  flowrun runs --follow outputs/2026-01-31/13-00-00_gpt_tiny
"""
CALIBRATE_HELP = """Measure this machine, and write a hardware profile (3 minutes).

Products, convolutions, streams, and every collective between 2 and 4 processes.  The file is one of
the group [bold]hardware[/] of a folder of your own groups.  With a recipe its ops are timed too,
each with its shapes; to a file that is there they are added:

  flowrun calibrate profiles/hardware/mine.yaml
  flowrun calibrate profiles/hardware/mine.yaml recipe=resnet_dp
  flowrun plan recipe=resnet_dp --config-dir profiles hardware=mine
"""
