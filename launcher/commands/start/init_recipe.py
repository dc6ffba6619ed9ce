"""flowrun init: write a commented recipe for a model, by what its signature, its forward and its
data show.  What cannot be known stands as ??? in the recipe.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from torch import Tensor

from flowrun.launcher.commands.start.inspect_model import (
    TARGETS,
    MakerFunction,
    arguments_of_forward,
    find_data,
    find_model,
    find_named,
    read_first_item,
)
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import Target
from flowrun.launcher.terminal.console import say

_MISSING = "???"  # Hydra's own sign for a value that must be given
_TEXT = "flowrun.launcher.data.corpus.text.Text"
_BATCH = 32
_LENGTH = 256  # tokens of a sample, or what the model's config allows
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")  # how configs call the most of them
_RECIPE = Template("""\
# $title, a recipe that flowrun init began.
# flowrun plan shows what it would do, flowrun --cfg job all keys.
defaults: [/optim: adamw, /launch: local]

model:
$model

data:
$data

task:
$task

placement:
  axes: {data: 1, tensor: 1}              # ranks that share samples, weights
  stages: 1                               # parts of the model, in a row

eval: {fraction: 0.05, batches: 4}        # share that is held out
optim: {lr: $rate}                        # others: [/optim: sgd] above
train: {batch_size: $batch, steps: 100}   # or epochs: 2 in place of steps
# precision: {dtype: bf16}                # compute; weights stay fp32
# zero: {stage: 1}                        # split optimizer states over data
""")
_OF_TRANSFORMERS = """\
# sbp: {from_model: tensor}               # its own plan for tensor: 2
# adapters: {modules: ['*.q_proj']}       # LoRA; the rest is frozen
"""

Given = Mapping[str, Target]  # arguments of "model" and of "data"


@dataclass(frozen=True, kw_only=True)
class WrittenRecipe:
    """A recipe that was written.  missing: keys that the user has to fill in."""

    file: Path
    missing: Sequence[str]
    notes: Sequence[str]


def write_recipe(
    target: str, data: str | None, file: Path | None, words: Sequence[str] = (), force: bool = False
) -> WrittenRecipe:
    """Write the recipe of a model.

    target: a dotted class or function, a module or file with one model, or a folder of Hugging
    Face.  data: a dotted data set; without it one in the model's module is taken.  file: where to
    write; without it recipes/NAME.yaml.  words: model.KEY=VALUE and data.KEY=VALUE.  force: write
    over a file.  Raises RecipeError.
    """
    folder, given = Path(target), _read_words(words)
    if folder.is_dir() and not (folder / "__init__.py").exists():
        name = folder.resolve().name
        text, notes = _of_folder(folder, data or _TEXT, given)
    else:
        path, module = find_model(target)
        *modules, name = path.split(".")
        name = name if name[0].isupper() or not modules else modules[-1]  # of a function its module
        text, notes = _of_class(path, module, data, given)
    file = file or Path("recipes") / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.yaml"
    if file.exists() and not force:
        another = "Write another: --to FILE.yaml; or write over it: --force."
        raise CommandLineError(str(file), "this file is there already.", another)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    missing = [key for key, value in flatten_keys(yaml.safe_load(text)) if value == _MISSING]
    keys = dict.fromkeys(re.sub(r"^(task\.\w+).*", r"\1", key) for key in missing)
    return WrittenRecipe(file=file, missing=[*keys], notes=notes)


def _read_words(words: Sequence[str]) -> Given:
    """Read model.KEY=VALUE and data.KEY=VALUE."""
    given: dict[str, Target] = {"model": {}, "data": {}}
    for word in words:
        name, equals, value = word.partition("=")
        section, _, key = name.partition(".")
        if not equals or section not in given or not key.isidentifier():
            raise CommandLineError(
                word,
                "init takes arguments of the model and of the data set.",
                "Write model.KEY=VALUE or data.KEY=VALUE; change other keys in the recipe.",
            )
        given[section][key] = yaml.safe_load(value)
    return given


def _of_class(path: str, module: str, data: str | None, given: Given) -> tuple[str, list[str]]:
    """Return the recipe of a class or function of a module that makes a model, and notes."""
    maker = find_named(path)
    data = data.replace(".py:", ".") if data else find_data(module)
    arguments = arguments_of_forward(maker)
    fields: Mapping[str, Tensor] = {}
    lines, batch, notes = [f"_target_: '{_MISSING}'"], _BATCH, []
    if data is None:
        notes.append("a data set has __len__ and __getitem__, and its items are dicts of tensors")
    else:
        lines = _target_lines(data, find_named(data), given["data"])
        if not _has_gaps(lines):
            first = read_first_item(data, given["data"], arguments)
            lines, fields = first.lines(lines), first.fields
            batch = max(1, min(_BATCH, first.number * 9 // 10))
    task, of_task = _task_lines(arguments, fields)
    text = _RECIPE.substitute(
        title=f"{path}{f' on {data}' if data else ''}",
        model=_indent(_target_lines(path, maker, given["model"])),
        data=_indent(lines),
        task=_indent(task),
        batch=batch,
        rate="0.001",
    )
    return text, [*notes, *of_task]


def _of_folder(folder: Path, data: str, given: Given) -> tuple[str, list[str]]:
    """Return the recipe of a folder of Hugging Face, its model and text by its tokenizer; notes."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise CommandLineError(
            str(folder),
            "this folder has no config.json that names its architecture.",
            "Name a folder that a model of transformers has saved, or a class: my_models.Net.",
        ) from None
    weights = any(folder.glob("*.safetensors"))
    tokenizer = any(folder.glob("tokenizer*.json"))
    longest = [config[key] for key in _CONTEXT if isinstance(config.get(key), int)]
    known = {
        "length": min([_LENGTH, *longest]),
        "tokenizer": str(folder) if tokenizer else _MISSING,
    }
    notes = []
    if data == _TEXT:
        known["path"] = None
        notes.append("data.path is the text to train on; null is the source of Python's library")
    if not tokenizer and "tokenizer" not in given["data"]:
        notes.append("the folder has no tokenizer: flowrun tokenizer trains one on text")
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        notes.append(f"{architecture} is not a causal language model: check the task")
    maker, arguments = find_named(data), {"input_ids": True, "labels": False}
    lines, fields = _target_lines(data, maker, given["data"], known), {}
    if maker.__module__.startswith("flowrun.launcher.data.corpus."):
        fields = dict.fromkeys(("tokens", "targets"), torch.zeros(1, dtype=torch.int64))
    elif not _has_gaps(lines):
        fields = dict(read_first_item(data, given["data"], arguments).fields)
    task, of_task = _task_lines(arguments, fields)
    text = _RECIPE.substitute(
        title=f"{architecture} of {folder}",
        model=_indent(
            [
                f"_target_: transformers.{architecture}",
                "config:",
                "  _target_: transformers.AutoConfig.from_pretrained",
                f"  pretrained_model_name_or_path: {folder}",
                f"weights: {folder}" if weights else "# weights: the folder has none",
            ]
        ),
        data=_indent(lines),
        task=_indent(task),
        batch=_BATCH,
        rate="0.00002" if weights else "0.001",
    )
    return text + _OF_TRANSFORMERS, [*notes, *of_task]


def _indent(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _has_gaps(lines: Sequence[str]) -> bool:
    return any(_MISSING in line for line in lines)


def _target_lines(
    path: str, maker: MakerFunction, given: Target, known: Target | None = None
) -> list[str]:
    """Return the YAML of a target with its arguments.

    path, maker: of the target, and what it names.  given: by the user.  known: values for those of
    its arguments that the user does not give.
    """
    lines, values = [f"_target_: {path}"], dict(given)
    with suppress(TypeError, ValueError):  # what is written in C may have no signature
        for p in inspect.signature(maker).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                continue
            if p.name in values or p.name in (known or {}) or p.default is p.empty:
                value = values.pop(p.name, (known or {}).get(p.name, _MISSING))
                lines.append(f"{p.name}: {_as_yaml(value)}")
            elif isinstance(p.default, str | int | float | bool | type(None)):
                lines.append(f"# {p.name}: {json.dumps(p.default):<20}  # the default")
    return [*lines, *(f"{name}: {_as_yaml(value)}" for name, value in values.items())]


def _as_yaml(value: object) -> str:
    """Return a value in a line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _task_lines(
    arguments: Mapping[str, bool], fields: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Return the YAML of the task, and notes: a loss for the first field that is left, unless
    forward has taken the target.

    arguments: of forward, and whether each must be given.  fields: of an item; none if unknown.
    """
    needed = [name for name, must in arguments.items() if must]
    if not fields or not arguments:
        gap = {"inputs": dict.fromkeys(needed or ["x"], _MISSING), "loss": {"_target_": _MISSING}}
        return [f"{key}: {_as_yaml(value)}" for key, value in gap.items()], []
    inputs, left = _match(arguments, needed, fields)
    notes = [
        f"task.inputs.{argument} is the field {field}, the first left"
        for argument, field in inputs.items()
        if argument != field
    ]
    lines = [f"inputs: {_as_yaml(inputs)}  # argument of forward: field of an item"]
    if {*TARGETS} & {*inputs}:
        return [*lines, "# loss: the model returns it, or see losses.model_loss"], notes
    if not left:
        return [*lines, f"loss: {{_target_: '{_MISSING}'}}  # called loss(output, batch)"], notes
    of_loss, why = _loss_lines(left[0], fields[left[0]])
    return [*lines, *of_loss], [*notes, why]


def _match(
    arguments: Iterable[str], needed: Iterable[str], fields: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return argument -> field, by equal names, then in their order; and the fields left."""
    inputs = {name: name for name in arguments if name in fields}
    left = [name for name in fields if name not in inputs]
    free = [name for name in needed if name not in inputs]
    return inputs | dict(zip(free, left, strict=False)), left[len(free) :]


def _loss_lines(name: str, target: Tensor) -> tuple[list[str], str]:
    """Return the YAML of the loss and metrics for a target, the field `name` of an item; a note."""
    metric = ""
    if not target.dtype.is_floating_point:
        loss, why = "cross_entropy", "numbers of classes"
        metric = "accuracy" if target.dim() == 0 else ""
    elif {*target.unique().tolist()} <= {0.0, 1.0}:
        loss, metric, why = "binary_cross_entropy", "binary_accuracy", "0 or 1"
    else:
        loss, why = "squared_error", "numbers"
    given = {} if name == "targets" else {"target": name}
    lines = [f"loss: {_as_yaml({'_target_': f'flowrun.models.losses.{loss}', **given})}"]
    if metric:
        named = {metric: {"_target_": f"flowrun.models.metrics.{metric}", **given}}
        lines.append(f"metrics: {_as_yaml(named)}")
    return lines, f"task.loss is {loss}, as the field {name} holds {why}"


def show_written(written: WrittenRecipe, console: Console) -> None:
    """Print where the recipe is, what it lacks, and what to do next."""
    console.print(written.file.read_text(), highlight=False, markup=False, soft_wrap=True)
    for note in written.notes:
        say(console, f"note: {note}", "yellow")
    recipe = written.file.stem if written.file.parent == Path("recipes") else written.file
    say(console, f"{written.file} is written")
    if written.missing:
        say(console, f"Write instead of ???: {', '.join(written.missing)}")
    for command, what in (
        (f"flowrun plan recipe={recipe}", "what it would do"),
        (f"flowrun recipe={recipe}", "train"),
        (f"flowrun recipe={recipe} placement.axes.data=2", "on two ranks"),
    ):
        say(console, f"  {command:<50} {what}")
