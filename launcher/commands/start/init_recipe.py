"""flowrun init: write a commented recipe for a model, by what its signature, its forward and its
data show.  What cannot be known stands as ??? in the recipe.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
import yaml  # type: ignore[import-untyped]
from rich.console import Console

from flowrun.launcher.commands.start.guess_task import DryModel, guess_task, make_dry
from flowrun.launcher.commands.start.inspect_model import (
    MakerFunction,
    find_data,
    find_model,
    find_named,
    find_path,
    name_data,
    of_word,
)
from flowrun.launcher.commands.start.sample_items import SampleItems, read_items
from flowrun.launcher.model.dataset_checks import NAMED
from flowrun.launcher.model.targets import list_arguments
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import Target
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.console import say

_MISSING = "???"  # Hydra's own sign for a value that must be given
_CORPUS = "flowrun.launcher.data.corpus."  # fields of these are known
_TEXT = f"{_CORPUS}text.Text"
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
train: {batch_size: $batch, steps: 100}       # or epochs: 2 in place of steps
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
    of_model = {"_target_": path, **given["model"]}
    model_lines, model = _target_lines(of_model, find_named(path)), None
    arguments = list_arguments(getattr(find_named(path), "forward", None))
    if not _has_gaps(model_lines):
        doing.doing("making the model")
        with of_word(path):
            model = make_dry(of_model)
        arguments = list_arguments(model.module.forward)
    found = [name_data(find_path(data))] if data else find_data(module, given["data"])
    names = [str(target.get("path", target["_target_"])) for target in found]
    lines, items, notes = [f"_target_: '{_MISSING}'"], None, []
    if len(found) == 1:
        lines, items = _read_data(names[0], {**found[0], **given["data"]}, arguments)
    else:
        notes.append(f"--data NAME takes a data set; this module has {', '.join(names) or 'none'}")
    task, of_task = _task_lines(arguments, items, model)
    title = f"{path}{f' on {names[0]}' if len(names) == 1 else ''}"
    batch = max(1, min(_BATCH, items.number * 9 // 10)) if items else _BATCH
    text = _fill(title, batch, "0.001", model=model_lines, data=lines, task=task)
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
    path, weights = _as_yaml(str(folder)), any(folder.glob("*.safetensors"))
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
    arguments = {"input_ids": True, "labels": False}
    lines, items = _read_data(data, {"_target_": data, **given["data"]}, arguments, known)
    if data.startswith(_CORPUS):
        fields = dict.fromkeys(("tokens", "targets"), torch.zeros(1, dtype=torch.int64))
        items = SampleItems(fields=fields, number=0)
    task, of_task = _task_lines(arguments, items, None)
    model = [
        f"_target_: transformers.{architecture}",
        "config:",
        "  _target_: transformers.AutoConfig.from_pretrained",
        f"  pretrained_model_name_or_path: {path}",
        f"weights: {path}" if weights else "# weights: the folder has none",
    ]
    rate = "0.00002" if weights else "0.001"
    text = _fill(f"{architecture} of {folder}", _BATCH, rate, model=model, data=lines, task=task)
    return text + _OF_TRANSFORMERS, [*notes, *of_task]


def _read_data(
    word: str, target: Target, arguments: Mapping[str, bool], known: Target | None = None
) -> tuple[list[str], SampleItems | None]:
    """Return the YAML of a data set, and some of its items; None if it lacks arguments.

    word: its name on the command line.  arguments: of forward.  known: see _target_lines.
    """
    lines = _target_lines(target, find_named(str(target["_target_"])), known)
    if _has_gaps(lines) or target["_target_"].startswith(_CORPUS):
        return lines, None
    items = read_items(word, target, arguments)
    if items.names:
        named = [f"_target_: {NAMED}", f"names: {_as_yaml(items.names)}"]
        lines = [*named, "data:", *(f"  {line}" for line in lines)]
    return [items.comment, *lines], items


def _fill(title: str, batch: int, rate: str, **sections: Sequence[str]) -> str:
    """Return a recipe.  sections: the lines of its model, data and task."""
    texts = {name: "\n".join(f"  {line}" for line in lines) for name, lines in sections.items()}
    return _RECIPE.substitute(title=title, batch=batch, rate=rate, **texts)


def _has_gaps(lines: Sequence[str]) -> bool:
    return any(_MISSING in line for line in lines)


def _target_lines(target: Target, maker: MakerFunction, known: Target | None = None) -> list[str]:
    """Return the YAML of a target with its arguments.

    target: with the arguments that the user gives.  maker: what it names.  known: values for those
    that the user does not give.
    """
    values = {name: value for name, value in target.items() if name != "_target_"}
    lines = [f"_target_: {target['_target_']}"]
    with suppress(TypeError, ValueError):  # what is written in C may have no signature
        for p in inspect.signature(maker).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                continue
            if p.name in values or p.name in (known or {}) or p.default is p.empty:
                value = values.pop(p.name, (known or {}).get(p.name, _MISSING))
                lines.append(f"{p.name}: {_as_yaml(value)}")
            elif isinstance(p.default, str | int | float | bool | type(None)):
                lines.append(f"{f'# {p.name}: {json.dumps(p.default)}':<38}  # the default")
    return [*lines, *(f"{name}: {_as_yaml(value)}" for name, value in values.items())]


def _as_yaml(value: object) -> str:
    """Return a value in a line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _task_lines(
    arguments: Mapping[str, bool], items: SampleItems | None, model: DryModel | None
) -> tuple[list[str], list[str]]:
    """Return the YAML of the task, and notes.

    arguments: of forward, and whether each must be given.  items: None: unknown.  model: None: it
    lacks arguments.
    """
    if not items or not arguments:
        needed = [name for name, must in arguments.items() if must]
        gap = {"inputs": dict.fromkeys(needed or ["x"], _MISSING), "loss": {"_target_": _MISSING}}
        return [f"{key}: {_as_yaml(value)}" for key, value in gap.items()], []
    task = guess_task(model, arguments, items.fields)
    if items.left_out and task.loss == {}:
        raise items.left_out[0]
    notes = [f"left out: {error.problem}" for error in items.left_out]
    for argument, field in task.inputs.items():
        notes += [f"task.inputs.{argument} is the field {field}"] if argument != field else []
    lines = [f"inputs: {_as_yaml(dict(task.inputs))}  # argument of forward: field of an item"]
    if task.loss is None:
        notes.append(f"task.loss is left out: {task.why}")
        return [*lines, "# loss: the model returns it, or see losses.model_loss"], notes
    lines.append(f"loss: {_as_yaml({**(task.loss or {'_target_': _MISSING})})}")
    lines += [f"metrics: {_as_yaml({**task.metrics})}"] if task.metrics else []
    name = str(task.loss.get("_target_", "unknown")).rpartition(".")[2]
    return lines, [*notes, f"task.loss is {name}: {task.why}"]


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
