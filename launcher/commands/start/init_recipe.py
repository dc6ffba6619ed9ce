"""flowrun init: write a commented recipe for a model, by what its signature, its forward and its
data show.

What cannot be known stands as ??? in the recipe, and is named when it has been written.  A second
init reads what was filled in, tries the model and the data with it, and fills in the rest.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from rich.console import Console
from torch import nn

from flowrun.launcher.commands.start.inspect_model import (
    FirstItem,
    MakerFunction,
    NoLoss,
    Value,
    arguments_of_forward,
    call_maker,
    describe_field,
    find_data,
    find_loss,
    find_model,
    find_named,
    read_first_item,
)
from flowrun.launcher.model.dataset_checks import NAMED
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal.console import say

_COMMENT_AT = 40  # column of comments
_MISSING = "???"  # Hydra's own sign for a value that must be given
_TEXT = "flowrun.launcher.data.corpus.text.Text"
_GAP = f'"{_MISSING}"'  # in braces, where YAML gives a ? a meaning
_NO_LOSS = f"{{_target_: {_GAP}}}"
_ANOTHER = "Write another: --to FILE.yaml; or write over it: --force."
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

    title: its first line.  model, data: lines of YAML.  task: of the model and its data.
    samples: of the data set.  rate: of learning.  more: lines at the end.
    """

    title: str
    model: Sequence[str]
    data: Sequence[str]
    task: TaskDraft
    samples: int | None = None
    notes: Sequence[str] = ()
    rate: str = "0.001"
    more: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TaskDraft:
    """The task of a recipe.

    inputs: argument of forward -> field.  loss, metrics: YAML in a line; an empty one is left out.
    """

    inputs: Mapping[str, str]
    loss: str = ""
    metrics: str = ""
    notes: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """The section as YAML."""
        shown = ", ".join(f"{argument}: {field}" for argument, field in self.inputs.items())
        lines = [_add_comment(f"  inputs: {{{shown}}}", "argument of forward: field of an item")]
        if self.loss:
            lines.append(_add_comment(f"  loss: {self.loss}", "called loss(output, batch)"))
        return [*lines, *([f"  metrics: {self.metrics}"] if self.metrics else [])]


def write_recipe(
    target: str, data: str | None, file: Path | None, words: Sequence[str] = (), force: bool = False
) -> WrittenRecipe:
    """Write the recipe of a model.

    target: a dotted class or function, a module or file with one model, or a folder of Hugging
    Face.  data: a dotted data set; without it one in the model's module is taken.  file: where to
    write; without it recipes/NAME.yaml.  words: model.KEY=VALUE and data.KEY=VALUE.  force: write
    over a file.  Without it a file in which ??? stands is filled in, and another is refused.
    Raises RecipeError.
    """
    folder = Path(target)
    is_folder = folder.is_dir() and not (folder / "__init__.py").exists()
    path, module = ("", "") if is_folder else find_model(target)
    maker = find_named(path) if path else None
    name = folder.resolve().name if is_folder else _name_of(path)
    file = file or Path("recipes") / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.yaml"
    before = "" if force or not file.exists() else file.read_text(encoding="utf-8")
    given = _read_filled(file, before) if before else {"model": {}, "data": {}}
    data = data or str(given["data"].pop("_target_", "")) or None
    for word in words:
        section, key, value = _read_word(word)
        given[section][key] = value
    if maker is None:
        draft = _hugging_face(folder, data, given)
    else:
        draft = _own_model(path, maker, module, data, given)
    text = _fill_in(before, make_text(draft)) if before else make_text(draft)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return WrittenRecipe(file=file, missing=_missing_of(text), notes=draft.notes)


InitArguments = Mapping[
    str, dict[str, object]
]  # section -> argument -> value, of `model` and `data`


def _read_word(word: str) -> tuple[str, str, object]:
    """Read model.KEY=VALUE or data.KEY=VALUE."""
    name, equals, value = word.partition("=")
    section, _, key = name.partition(".")
    if not equals or section not in ("model", "data") or not key.isidentifier():
        raise CommandLineError(
            word,
            "init takes arguments of the model and of the data set.",
            "Write model.KEY=VALUE or data.KEY=VALUE; change other keys in the recipe.",
        )
    return section, key, yaml.safe_load(value)


def _read_filled(file: Path, text: str) -> InitArguments:
    """Read the arguments that a user has filled in.  Raises RecipeError for a complete recipe."""
    try:
        tree = yaml.safe_load(text)
        sections = {name: dict(tree[name]) for name in ("model", "data")}
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        problem = f"this file is there, and cannot be filled in: {type(error).__name__}."
        raise CommandLineError(str(file), problem, _ANOTHER) from None
    if not _missing_of(text):
        raise CommandLineError(str(file), "this file is there already.", _ANOTHER)
    if "names" in sections["data"] and isinstance(sections["data"].get("data"), dict):
        sections["data"] = dict(sections["data"]["data"])  # named values of tuples
    known = {
        name: {key: value for key, value in section.items() if value != _MISSING}
        for name, section in sections.items()
    }
    known["model"].pop("_target_", None)
    return known


def _missing_of(text: str) -> list[str]:
    """Return the keys of a recipe at which ??? stands; of the task its own."""
    keys = [key for key, value in flatten_keys(yaml.safe_load(text)) if value == _MISSING]
    return list(dict.fromkeys(re.sub(r"^(task\.\w+).*", r"\1", key) for key in keys))


def _fill_in(before: str, drafted: str) -> str:
    """Return a recipe in which the sections with ??? are those of a draft.

    before: the recipe.  Keys of its task that are complete stay, and all other sections.
    """
    old, new = _blocks(before), _blocks(drafted)
    redone = [name for name in ("model", "data", "task") if _MISSING in old.get(name, _MISSING)]
    if "task" in redone:
        redone.append("data")  # which may have names for its values now
        kept = _blocks(old.get("task", ""), "  ")
        entries = {**kept, **_blocks(new["task"], "  ")}
        whole = {key: text for key, text in kept.items() if key and _MISSING not in text}
        new["task"] = "".join({**entries, **whole}.values())
    return "".join({**old, **{name: new[name] for name in redone}}.values())


def _blocks(text: str, indent: str = "") -> dict[str, str]:
    """Cut YAML before each key of a depth: key -> its lines; "" -> what precedes the first."""
    found = {"": ""}
    name = ""
    for line in text.splitlines(keepends=True):
        if key := re.match(rf"{indent}(\w+):", line):
            name = key[1]
        found[name] = found.get(name, "") + line
    return found


def _name_of(path: str) -> str:
    """Return the class of a dotted path; of a function, which makes a model, its module."""
    *modules, last = path.split(".")
    return last if last[0].isupper() or not modules else modules[-1]


def make_text(draft: Draft) -> str:
    """Return the recipe as YAML."""
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
        *draft.task.lines,
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


def _own_model(
    path: str, maker: MakerFunction, module: str, data: str | None, given: InitArguments
) -> Draft:
    """Draft the recipe of a class or function that makes a model.  module: that it is in."""
    model_lines, whole = _target_lines(path, maker, "model", given)
    made = call_maker(maker, path, given["model"]) if whole else None
    model = made if isinstance(made, nn.Module) else None
    data = data.replace(".py:", ".") if data else find_data(module)
    arguments = arguments_of_forward(maker if model is None else model)
    first, notes = None, []
    if data is None:
        data_lines = [_add_comment(f"_target_: {_MISSING}", "a class with __len__ and __getitem__")]
        notes = ["a data set has __len__ and __getitem__, and its items are dicts of tensors"]
    else:
        set_maker = find_named(data)
        data_lines, whole = _target_lines(data, set_maker, "data", given)
        if whole:
            first = read_first_item(set_maker, data, arguments, given["data"])
            data_lines = _lines_of_items(data_lines, first)
    task = _task(arguments, first.fields if first else None, model)
    return Draft(
        title=f"# {path}{f' on {data}' if data else ''}, a recipe that flowrun init began.",
        model=model_lines,
        data=data_lines,
        task=task,
        samples=first.number if first else None,
        notes=[*notes, *task.notes],
    )


def _lines_of_items(lines: Sequence[str], first: FirstItem) -> list[str]:
    """Add what the items are to the lines of a data set, and names where their values have none."""
    shown = [f"{name} {describe_field(value)}" for name, value in first.fields.items()]
    comment = f"# {first.number:,} items: {', '.join(shown)}"
    if not first.names:
        return [comment, *lines]
    return [
        comment,
        f"_target_: {NAMED}",
        _add_comment(f"names: [{', '.join(first.names)}]", "of the values of an item"),
        "data:",
        *(f"  {line}" for line in lines),
    ]


def _task(
    arguments: Mapping[str, bool], item: Mapping[str, Value] | None, model: nn.Module | None
) -> TaskDraft:
    """Draft the task: inputs by equal names, then by what is left; the loss by what the model
    returns for two samples.

    arguments: of forward, and whether each must be given.  item: of the data set; None: unknown.
    model: None: it could not be made.
    """
    needed = [name for name, must in arguments.items() if must]
    if item is None or not arguments:
        return TaskDraft(inputs=dict.fromkeys(needed or ["x"], _GAP), loss=_NO_LOSS)
    inputs, notes = {name: name for name in arguments if name in item}, []
    left = [name for name in item if name not in inputs]
    for argument in needed:
        if argument not in inputs and left:
            inputs[argument] = left.pop(0)
            notes.append(f"task.inputs.{argument} is the field {inputs[argument]}, the first left")
    try:
        found = find_loss(model, item, inputs, left)
    except NoLoss as why:
        return TaskDraft(inputs=inputs, loss=_NO_LOSS, notes=[*notes, str(why)])
    notes += [found.note] if found.note else []
    return TaskDraft(inputs=inputs, loss=found.loss, metrics=found.metrics, notes=notes)


def _target_lines(
    path: str,
    maker: MakerFunction,
    section: str,
    given: InitArguments,
    known: Mapping[str, tuple[object, str]] | None = None,
) -> tuple[list[str], bool]:
    """Return the YAML lines of a target with its arguments, and whether all that it needs is there.

    path, maker: of the target, and what it names.  section: of the recipe.  known: argument ->
    value and comment; one whose value is empty must be said by the user.
    """
    lines, whole, known = [f"_target_: {path}"], True, known or {}
    values = dict(given[section])
    with suppress(TypeError, ValueError):
        for parameter in inspect.signature(maker).parameters.values():
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name in values:
                lines.append(f"{name}: {_as_yaml(values.pop(name))}")
            elif known.get(name, ("",))[0] != "":
                value, comment = known[name]
                lines.append(_add_comment(f"{name}: {value}", comment))
            elif parameter.default is parameter.empty or name in known:
                lines.append(_add_comment(f"{name}: {_MISSING}", "you say"))
                whole = False
            elif isinstance(parameter.default, str | int | float | bool | type(None)):
                shown = "null" if parameter.default is None else json.dumps(parameter.default)
                lines.append(_add_comment(f"# {name}: {shown}", "the default"))
    return [*lines, *(f"{name}: {_as_yaml(value)}" for name, value in values.items())], whole


def _as_yaml(value: object) -> str:
    """Return a value in a line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _hugging_face(folder: Path, data: str | None, given: InitArguments) -> Draft:
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
    lines, whole = _target_lines(data or _TEXT, maker, "data", given, known)
    if not tokenizer and "tokenizer" not in given["data"]:
        notes.append("the folder has no tokenizer: flowrun tokenizer trains one on text")
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if not causal:
        notes.append(
            f"{architecture} is not a causal language model: check task.inputs and task.loss"
        )
    task = _text_task(_fields_of(data or _TEXT, maker, whole, given), causal)
    return Draft(
        title=f"# {architecture} of {folder}, a recipe that flowrun init began.",
        model=model,
        data=lines,
        task=task,
        rate="0.00002" if weights else "0.001",
        more=[
            _add_comment("# sbp: {from_model: tensor}", "its own plan for tensor: 2"),
            _add_comment("# adapters: {modules: ['*.q_proj']}", "LoRA; the rest is frozen"),
        ],
        notes=notes,
    )


def _fields_of(data: str, maker: MakerFunction, whole: bool, given: InitArguments) -> Sequence[str]:
    """Return the fields of items of a data set; none where they cannot be known.

    data, maker: its name, and what it names.  whole: its arguments are known.
    """
    from flowrun.launcher.data.corpus.answers import AnsweredDocuments
    from flowrun.launcher.data.corpus.text_rows import TextRows
    from flowrun.launcher.data.corpus.windows import Windows

    if inspect.isclass(maker) and issubclass(maker, AnsweredDocuments | TextRows | Windows):
        return ("tokens", "targets")
    arguments = {"input_ids": True, "labels": False}
    return (*read_first_item(maker, data, arguments, given["data"]).fields,) if whole else ()


def _text_task(fields: Sequence[str], causal: bool) -> TaskDraft:
    """Draft the task of a model of transformers.

    fields: of items; the loss reads `targets`, which are shifted already and say what counts.
    causal: the model has logits of the next id, and shifts labels by itself.
    """
    ids = next((name for name in ("tokens", "input_ids") if name in fields), None)
    if ids is None:
        return TaskDraft(inputs={"input_ids": _GAP})
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
    say(console, f"{written.file} is written")
    if written.missing:
        say(console, f"Write instead of ???: {', '.join(written.missing)}")
        say(console, "and run init again: it fills in what the model and the data then show.")
    for command, what in (
        (f"flowrun plan recipe={recipe}", "what it would do"),
        (f"flowrun recipe={recipe}", "train"),
        (f"flowrun recipe={recipe} placement.axes.data=2", "on two ranks"),
    ):
        say(console, f"  {command:<50} {what}")
