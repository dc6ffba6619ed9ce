"""flowrun init: write a commented recipe for a model, by what its signature, its forward and its
data show.

What cannot be known stands as ??? in the recipe, and is named when it has been written.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowrun.launcher.commands.start.inspect_model import (
    NoLoss,
    arguments_of_forward,
    call_maker,
    describe_field,
    find_data,
    find_loss,
    find_model,
    find_named,
    read_first_item,
)
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal.console import say

_COMMENT_AT = 40  # column of comments
_MISSING = "???"  # Hydra's own sign for a value that must be given
_TEXT = "flowrun.launcher.data.corpus.text.Text"
_BATCH = 32
_LENGTH = 256  # tokens of a sample, or what the model's config allows
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")  # how configs call the most of them


@dataclass(frozen=True, kw_only=True)
class WrittenRecipe:
    """A recipe that was written.  missing: keys that the user has to fill in."""

    file: Path
    missing: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What goes into a recipe.

    title: its first line.  model, data: lines of YAML.  inputs: argument of forward -> field.
    loss, metrics: of the task, as YAML in a line, or empty.  samples: of the data set.  rate: of
    learning.  more: lines at the end.
    """

    title: str
    model: Sequence[str]
    data: Sequence[str]
    inputs: Mapping[str, str]
    loss: str = ""
    metrics: str = ""
    samples: int | None = None
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()
    rate: str = "0.001"
    more: Sequence[str] = ()


def write_recipe(target: str, data: str | None, file: Path | None) -> WrittenRecipe:
    """Write the recipe of a model.

    target: a dotted class or function, a module or file with one model, or a folder of Hugging
    Face.  data: a dotted data set; without it one in the model's module is taken.  file: where to
    write; without it recipes/NAME.yaml.  Raises RecipeError; a file that is there stays.
    """
    folder = Path(target)
    is_folder = folder.is_dir() and not (folder / "__init__.py").exists()
    draft = _hugging_face(folder, data) if is_folder else _own_model(target, data)
    name = folder.resolve().name if is_folder else _name_of(draft.title.split()[1].strip(","))
    file = file or Path("recipes") / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.yaml"
    if file.exists():
        raise CommandLineError(
            str(file),
            "this file is there already.",
            "Write another: --to FILE.yaml.",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(make_text(draft), encoding="utf-8")
    return WrittenRecipe(file=file, missing=draft.missing, notes=draft.notes)


def _name_of(path: str) -> str:
    """Return the class of a dotted path; of a function, which makes a model, its module."""
    *modules, last = path.split(".")
    return last if last[0].isupper() or not modules else modules[-1]


def make_text(draft: Draft) -> str:
    """Return the recipe as YAML."""
    inputs = ", ".join(f"{argument}: {field}" for argument, field in draft.inputs.items())
    batch = _BATCH if draft.samples is None else max(1, min(_BATCH, draft.samples * 9 // 10))
    lines = [
        draft.title,
        "# flowrun plan shows what it would do, flowrun --cfg job all keys.",
        "defaults: [/optim: adamw, /launch: local]",
        "",
        "model:",
        *(f"  {line}" for line in draft.model),
        "",
        "data:",
        *(f"  {line}" for line in draft.data),
        "",
        "task:",
        _add_comment(f"  inputs: {{{inputs or _MISSING}}}", "argument of forward: field"),
        *(
            [_add_comment(f"  loss: {draft.loss}", "called loss(output, batch)")]
            if draft.loss
            else []
        ),
        *([f"  metrics: {draft.metrics}"] if draft.metrics else []),
        "",
        "placement:",
        _add_comment("  axes: {data: 1, tensor: 1}", "ranks that share samples, weights"),
        _add_comment("  stages: 1", "parts of the model, in a row"),
        "",
        _add_comment("eval: {fraction: 0.05, batches: 4}", "share that is held out"),
        _add_comment(f"optim: {{lr: {draft.rate}}}", "others: [/optim: sgd] above"),
        _add_comment(
            f"train: {{batch_size: {batch}, steps: 100}}", "or epochs: 2 in place of steps"
        ),
        _add_comment("# precision: {dtype: bf16}", "compute; weights stay fp32"),
        _add_comment("# zero: {stage: 1}", "split optimizer states over data"),
        *draft.more,
    ]
    return "\n".join(lines) + "\n"


def _add_comment(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_AT}}  # {comment}"


def _own_model(target: str, data: str | None) -> Draft:
    """Draft the recipe of a class or function that makes a model."""
    from flowrun.launcher.model.dataset_checks import NAMED

    path, module = find_model(target)
    maker = find_named(path)
    model_lines, missing = _target_lines(path, maker, "model")
    model = None if missing else call_maker(maker, path)
    data = data.replace(".py:", ".") if data else find_data(module)
    arguments = arguments_of_forward(maker if model is None else model)
    first = None
    if data is None:
        data_lines = [_add_comment(f"_target_: {_MISSING}", "a class with __len__ and __getitem__")]
        missing.append("data._target_")
        note = ["a data set has __len__ and __getitem__, and its items are dicts of tensors"]
    else:
        set_maker, note = find_named(data), []
        data_lines, more = _target_lines(data, set_maker, "data")
        first = None if more else read_first_item(set_maker, data, arguments)
        missing += more
    if first is not None:
        shown = [f"{name} {describe_field(value)}" for name, value in first.fields.items()]
        if first.names:
            data_lines = [
                f"_target_: {NAMED}",
                _add_comment(f"names: [{', '.join(first.names)}]", "of the values of an item"),
                "data:",
                *(f"  {line}" for line in data_lines),
            ]
        data_lines.insert(0, f"# {first.number:,} items: {', '.join(shown)}")
    task = _task(arguments, first.fields if first else None, model)
    return Draft(
        title=f"# {path}{f' on {data}' if data else ''}, a recipe that flowrun init began.",
        model=model_lines,
        data=data_lines,
        samples=first.number if first else None,
        missing=[*missing, *task.missing],
        notes=[*note, *task.notes],
        inputs=task.inputs,
        loss=task.loss,
        metrics=task.metrics,
    )


@dataclass(frozen=True, kw_only=True)
class TaskDraft:
    """The task of a recipe, as Draft has it."""

    inputs: Mapping[str, str]
    loss: str = ""
    metrics: str = ""
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()


def _task(arguments: Mapping[str, bool], item: Mapping[str, Any] | None, model: Any) -> TaskDraft:
    """Draft the task: inputs by equal names, then by what is left; the loss by what the model
    returns for two samples.

    arguments: of forward, and whether each must be given.  item: of the data set; None: unknown.
    model: None: it could not be made.
    """
    required = [name for name, needed in arguments.items() if needed]
    if item is None or not arguments:
        return TaskDraft(
            inputs=dict.fromkeys(required, _MISSING),
            loss=f"{{_target_: {_MISSING}}}",
            missing=["task.inputs", "task.loss"],
        )
    inputs, notes = {name: name for name in arguments if name in item}, []
    left = [name for name in item if name not in inputs]
    for argument in required:
        if argument not in inputs and left:
            inputs[argument] = left.pop(0)
            notes.append(f"task.inputs.{argument} is the field {inputs[argument]}, the first left")
    try:
        found = find_loss(model, item, inputs, left)
    except NoLoss as why:
        missing = ["task.loss"]
        return TaskDraft(
            inputs=inputs,
            loss=f"{{_target_: {_MISSING}}}",
            missing=missing,
            notes=[*notes, str(why)],
        )
    notes += [found.note] if found.note else []
    return TaskDraft(inputs=inputs, loss=found.loss, metrics=found.metrics, notes=notes)


def _target_lines(
    path: str, maker: Any, section: str, known: Mapping[str, tuple[Any, str]] | None = None
) -> tuple[list[str], list[str]]:
    """Return the YAML lines of a target with its arguments, and the keys that are missing.

    path, maker: of the target, and what it names.  section: of the recipe.  known: argument ->
    value and comment; one whose value is empty must be said by the user.
    """
    lines, missing, known = [f"_target_: {path}"], [], known or {}
    with suppress(TypeError, ValueError):
        for parameter in inspect.signature(maker).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if known.get(parameter.name, ("",))[0] != "":
                value, comment = known[parameter.name]
                lines.append(_add_comment(f"{parameter.name}: {value}", comment))
            elif parameter.default is parameter.empty or parameter.name in known:
                lines.append(_add_comment(f"{parameter.name}: {_MISSING}", "you say"))
                missing.append(f"{section}.{parameter.name}")
            elif isinstance(parameter.default, str | int | float | bool | type(None)):
                shown = "null" if parameter.default is None else json.dumps(parameter.default)
                lines.append(_add_comment(f"# {parameter.name}: {shown}", "the default"))
    return lines, missing


def _hugging_face(folder: Path, data: str | None) -> Draft:
    """Draft the recipe of a folder of Hugging Face: its model, and text by its tokenizer."""
    config = folder / "config.json"
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
        architecture = said["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise CommandLineError(
            str(folder),
            "this folder has no config.json that names its architecture.",
            "Name a folder that a model of transformers has saved, or a class: my_models.Net.",
        ) from None
    weights = any(folder.glob("*.safetensors"))
    model = [
        f"_target_: transformers.{architecture}",
        "config:",
        "  _target_: transformers.AutoConfig.from_pretrained",
        f"  pretrained_model_name_or_path: {folder}",
        _add_comment(f"weights: {folder}", "training starts from them")
        if weights
        else "# weights: the folder has none, so they are drawn by train.seed",
    ]
    tokenizer = any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    longest = [said[key] for key in _CONTEXT if isinstance(said.get(key), int)]
    known = {
        "length": (min([_LENGTH, *longest]), "tokens of a sample"),
        "tokenizer": (str(folder) if tokenizer else "", "a folder or a file"),
    }
    notes = []
    if not data:
        known["path"] = ("null", "a file or a folder of text; null: Python's own source")
        notes.append("data.path is the text to train on; null is the source of Python's library")
    maker = find_named(data or _TEXT)
    lines, missing = _target_lines(data or _TEXT, maker, "data", known)
    if "data.tokenizer" in missing:
        notes.append("the folder has no tokenizer: flowrun tokenizer trains one on text")
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if not causal:
        notes.append(f"{architecture} is no causal language model: check task.inputs and task.loss")
    task = _text_task(_fields_of(data or _TEXT, maker, missing), causal)
    return Draft(
        title=f"# {architecture} of {folder}, a recipe that flowrun init began.",
        model=model,
        data=lines,
        inputs=task.inputs,
        loss=task.loss,
        rate="0.00002" if weights else "0.001",
        more=[
            _add_comment("# sbp: {from_model: tensor}", "its own plan for tensor: 2"),
            _add_comment("# adapters: {modules: ['*.q_proj']}", "LoRA; the rest is frozen"),
        ],
        missing=[*missing, *task.missing],
        notes=notes,
    )


def _fields_of(data: str, maker: Any, missing: Sequence[str]) -> Sequence[str]:
    """Return the fields of items of a data set; none where they cannot be known.

    data, maker: its name, and what it names.  missing: keys without which it cannot be made.
    """
    from flowrun.launcher.data.corpus.answers import AnsweredDocuments
    from flowrun.launcher.data.corpus.text_rows import TextRows
    from flowrun.launcher.data.corpus.windows import Windows

    if inspect.isclass(maker) and issubclass(maker, AnsweredDocuments | TextRows | Windows):
        return ("tokens", "targets")
    arguments = {"input_ids": True, "labels": False}
    return () if missing else (*read_first_item(maker, data, arguments).fields,)


def _text_task(fields: Sequence[str], causal: bool) -> TaskDraft:
    """Draft the task of a model of transformers.

    fields: of items; the loss reads `targets`, which are shifted already and say what counts.
    causal: the model has logits of the next id, and shifts labels by itself.
    """
    ids = next((name for name in ("tokens", "input_ids") if name in fields), None)
    if ids is None:
        return TaskDraft(inputs={"input_ids": _MISSING}, missing=["task.inputs"])
    if causal and "targets" in fields:
        return TaskDraft(
            inputs={"input_ids": ids}, loss="{_target_: flowrun.models.losses.cross_entropy}"
        )
    more = [name for name in ("attention_mask", "labels") if name in fields]
    return TaskDraft(inputs={"input_ids": ids, "labels": ids, **{name: name for name in more}})


def show_written(written: WrittenRecipe, console: Console) -> None:
    """Print where the recipe is, what it lacks, and what to do next.

    written: the recipe.  console: to print to.
    """
    console.print(written.file.read_text(), highlight=False, markup=False, soft_wrap=True)
    for note in written.notes:
        say(console, f"note: {note}", "yellow")
    recipe = written.file.stem if written.file.parent == Path("recipes") else written.file
    missing = f"; say there instead of ???: {', '.join(written.missing)}" if written.missing else ""
    say(console, f"{written.file} is written{missing}")
    for command, what in (
        (f"flowrun plan recipe={recipe}", "what it would do"),
        (f"flowrun recipe={recipe}", "train"),
        (f"flowrun recipe={recipe} placement.axes.data=2", "on two ranks"),
    ):
        say(console, f"  {command:<50} {what}")
