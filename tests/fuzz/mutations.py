"""Mutations: a seed -> a recipe and a command line that most likely are wrong.

Four kinds: trees (keys of a resolved recipe deleted, retyped, renamed, nested), words (of the
command line), texts (bytes of a recipe's file) and plausible ones, which a person could have meant.
A case is a function of its seed alone.
"""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import CHOICES
from support.plans.small_recipes import RECIPES, overrides_of

FILE = "{file}"  # in the words of a case: the path of its recipe
FILES = {file.stem: file for file in RECIPES}
_BASES = """
    mlp_data_parallel mlp_hybrid mlp_pipeline gpt_hybrid gpt_pp gpt_tp gpt_zero bert_dp convnet_dp
    moe_ep insightface_hybrid wide_deep
"""
BASES = _BASES.split()
CONF = RECIPES[0].parents[1] / "conf"
# A model and a data set do with numbers of their own what they will: those stay small.
USERS = ("model", "data")
FEW = (0, -1, 1, 3, 0.5, -0.5)
HUGE = (2**31, 2**63, 2**64, -(2**63), 10**12, 1e40, 1e-300, math.inf, -math.inf, math.nan)
_WORDS = """
    x null S(0) S(9) P(max) ??? yes * [ { - a.b 0x10 2026-01-01 1_000 é \x07 ../.. /
    ${train.steps} ${no.such} ${oc.env:NO_SUCH} ${ torch.nn.Linear no.such.thing
"""
ODD_WORDS = ("", " ", "x" * 5000, *_WORDS.split())
ODD_VALUES: tuple[Any, ...] = (
    b"bytes",
    *yaml.safe_load(
        "[null, true, false, [], {}, [1], [[1], [2]], [null], [{}], {a: {}}, {in: 1}, {inn: {}},"
        " {1: 2}, {null: null}, {a.b: 1}, [[[[1]]]], [1, a, null], [0, 1], [x], {x: B}]"
    ),
)
ODD_KEYS = (1, None, True, "", "a.b", "*", "é", "x y", 1.5, "_target_", "in", "???")

# What a person could have written: values of keys that hold no word of the schema's choices.
_WRITTEN = """
placement.axes.data: 1 | 2 | 3 | 4 | 8
placement.axes.tensor: 1 | 2 | 3 | 4
placement.axes: {data: 2} | {tensor: 2, data: 2} | {pipe: 2} | {data: 2, tensor: 3}
placement.stages: 1 | 2 | 3 | 4 | [{modules: [hidden]}, {modules: [output]}] | [{ranks: [[0]]}]
placement.chunks: 1 | 2 | 3
placement.in_flight: 1 | 2 | 99 | gpipe | 1f1b | zero_bubble | v_zero_bubble | v_half | v_min
train.batch_size: 1 | 2 | 7 | 8 | 16 | 64 | 100 | 4096
train.micro_batches: 1 | 2 | 3 | 4 | 8
train.steps: 1 | 2 | 100
train.save_every: 0 | 1 | 7
zero.stage: 0 | 1 | 2 | 3
zero.axis: data | tensor | x
optim.lr: 0.1 | 1e-3 | 0 | -1
optim.clip_norm: 0 | 1.0
optim.clip_value: 0 | 0.5
optim.momentum: 0 | 0.9
optim.nesterov: true | false
optim.warmup_steps: 0 | 1 | 10
optim.ema: 0 | 0.9
optim.schedule: {name: CosineAnnealingLR} | {name: CosineAnnealingLR, T_max: 0} | {name: StepLR}
optim.schedule: {name: StepLR, step_size: 3} | {name: OneCycleLR, max_lr: 1}
optim.schedule: {name: MultiStepLR, milestones: 3} | [{name: LinearLR, steps: 3}, {name: StepLR}]
optim.groups: {'*bias': {weight_decay: 0}} | {'*': {frozen: true}} | {x: {lr: 1}} | {x: 1}
precision.loss_scale: dynamic | 1024 | -1 | null
recompute.modules: ['*'] | [blocks.*] | [hidden] | []
recompute.keep: [matmul] | [every_second_matmul, attention] | [boxing] | [x]
eval.fraction: 0 | 0.1 | 0.5 | 0.99 | 1
eval.batches: 0 | 1 | 1000
launch.nnodes: 1 | 2 | 3
engine.register_slots: 1 | 2 | 5
engine.blocking: [data] | [tensor] | [x]
engine.overwrites: true | false
engine.check: true | false
sbp.hidden.weight.data: B | S(0) | S(1) | S(2) | P
sbp.output.weight.tensor: B | S(0) | S1 | P
sbp.*.weight.tensor: B | S(0) | S(1)
sbp.blocks.*.data: B | S(0)
sbp.head.in.tensor: B | S(0) | S(2) | P
sbp.batch.images.data: S(0) | B | S(1)
model.hidden: 1 | 7 | 64
model.depth: 1 | 2 | 3
task.inputs: {x: images} | {} | {x: nothing}
task.metrics: {} | {a: {_target_: flowrun.models.metrics.accuracy}}
data.length: 1 | 8 | 64
"""


def _plausible_values() -> dict[str, tuple[str, ...]]:
    """Key of the command line -> values: words of the schema, files of conf/, and _WRITTEN."""
    found = dict(CHOICES)
    for group in ("optim", "launch", "hardware"):
        found[group] = tuple(sorted(file.stem for file in (CONF / group).glob("*.yaml")))
    for row in _WRITTEN.strip().splitlines():
        key, _, values = row.partition(": ")
        found[key] = (*found.get(key, ()), *values.split(" | "))
    return found


PLAUSIBLE = _plausible_values()


@dataclass(frozen=True)
class Case:
    """A case is what to plan: `flowrun plan WORDS`.

    words: of the command line; one may hold FILE.  file: bytes of the recipe that FILE stands for.
    """

    seed: int
    kind: str
    words: tuple[str, ...]
    file: bytes = b""


def make_case(seed: int) -> Case:
    chance = random.Random(seed)
    kind = chance.choice(tuple(KINDS))
    base = chance.choice(BASES)
    return KINDS[kind](seed, chance, base)


def _tree_case(seed: int, chance: random.Random, base: str) -> Case:
    tree = copy.deepcopy(_resolved(base))
    for _ in range(chance.choice((1, 1, 2, 3))):
        change_tree(chance, tree)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return Case(seed, "tree", (f"recipe={FILE}",), text.encode())


def _word_case(seed: int, chance: random.Random, base: str) -> Case:
    words = [_word(chance, base) for _ in range(chance.choice((1, 1, 2)))]
    return Case(seed, "words", (f"recipe={base}", *overrides_of(FILES[base]), *words))


def _plausible_case(seed: int, chance: random.Random, base: str) -> Case:
    keys = chance.sample(tuple(PLAUSIBLE), chance.choice((1, 2, 2, 3)))
    words = [f"{key}={chance.choice(PLAUSIBLE[key])}" for key in keys]
    return Case(seed, "plausible", (f"recipe={base}", *overrides_of(FILES[base]), *words))


def _text_case(seed: int, chance: random.Random, base: str) -> Case:
    text = FILES[base].read_bytes()
    for _ in range(chance.choice((1, 1, 2, 3))):
        text = chance.choice(TEXT_CHANGES)(chance, text)
    return Case(seed, "text", (f"recipe={FILE}", *overrides_of(FILES[base])), text)


KINDS: dict[str, Callable[[int, random.Random, str], Case]] = {
    "tree": _tree_case,
    "words": _word_case,
    "plausible": _plausible_case,
    "text": _text_case,
}


@cache
def _resolved(base: str) -> dict[str, Any]:
    """All keys of a shipped recipe, made smaller."""
    text = load([f"recipe={base}", *overrides_of(FILES[base])]).to_yaml()
    return yaml.safe_load(text)


# ---- trees ---------------------------------------------------------------------------------------


def change_tree(chance: random.Random, tree: dict[str, Any]) -> None:
    """Change one node of the tree, which any walk from the top may end at."""
    holder: Any = tree
    top = key = chance.choice(list(tree)) if tree else "name"
    while isinstance(holder.get(key) if isinstance(holder, dict) else holder[key], dict | list):
        inner = holder[key]
        if not inner or chance.random() < 0.25:
            break
        holder = inner
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    change = chance.choice(TREE_CHANGES)
    change(chance, holder, key, top)


def _delete(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    if isinstance(holder, list) or key in holder:
        del holder[key]


def _replace(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    holder[key] = _odd(chance, top)


def _wrap(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    value = holder.get(key) if isinstance(holder, dict) else holder[key]
    holder[key] = chance.choice(([value], {"x": value}, [[value]], {key: value}, str(value)))


def _rename(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    if isinstance(holder, dict) and key in holder:
        holder[chance.choice((*ODD_KEYS, _misspell(chance, str(key))))] = holder.pop(key)


def _add(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    value = _odd(chance, top)
    if isinstance(holder, dict):
        holder[chance.choice((*ODD_KEYS, *holder))] = value
    else:
        holder.append(value)


def _nest(chance: random.Random, holder: Any, key: Any, top: Any) -> None:
    value: Any = 1
    for _ in range(chance.choice((3, 30, 150))):
        value = {"a": value} if chance.random() < 0.5 else [value]
    holder[key] = value


TREE_CHANGES = (_delete, _replace, _replace, _replace, _wrap, _rename, _add, _nest)


def _odd(chance: random.Random, top: Any) -> Any:
    numbers = FEW if top in USERS else FEW + HUGE
    return copy.deepcopy(chance.choice(chance.choice((numbers, ODD_WORDS, ODD_VALUES))))


def _misspell(chance: random.Random, word: str) -> str:
    at = chance.randrange(len(word) + 1)
    return word[:at] + chance.choice(("", "x", word[at : at + 1] * 2)) + word[at + 1 :]


# ---- words ---------------------------------------------------------------------------------------


def _word(chance: random.Random, base: str) -> str:
    path = _any_path(chance, _resolved(base))
    key = ".".join(map(str, path))
    odd = _odd(chance, path[0])
    value = yaml.safe_dump(odd, default_flow_style=True, width=10**6).split("\n")[0]
    forms = (
        *(f"{key}={value}",) * 6,
        f"{key}={odd}",
        f"+{key}={value}",
        f"++{key}={value}",
        f"~{key}",
        f"~{key}={value}",
        f"{_misspell(chance, key)}={value}",
        f"{key}",
        f"{key}==",
        f"={value}",
        f"{key}=[{value}",
        f"{key}={{{value}}}",
        f"{key}='{value}",
        f"{key}={value},{value}",
        f"{path[0]}={chance.choice(ODD_WORDS)}",
        f"{path[0]}@x={value}",
        f"--{key}",
        f"--{key}={value}",
        chance.choice(ODD_WORDS),
        f"recipe={chance.choice(ODD_WORDS)}",
        f"hydra.run.dir={value}",
    )
    return chance.choice(forms).replace("\x00", "")


def _any_path(chance: random.Random, tree: dict[str, Any]) -> tuple[Any, ...]:
    path: tuple[Any, ...] = ()
    node: Any = tree
    while isinstance(node, dict) and node and (not path or chance.random() < 0.9):
        key = chance.choice(list(node))
        path, node = (*path, key), node[key]
    return path


# ---- texts ---------------------------------------------------------------------------------------


def _flip(chance: random.Random, text: bytes) -> bytes:
    at = chance.randrange(len(text) or 1)
    return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]


def _drop_line(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    return b"".join(lines[:at] + lines[at + 1 :])


def _repeat_line(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    return b"".join([*lines, chance.choice(lines)])


def _indent_line(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    lines[at] = chance.choice((b"  ", b"\t", b" ")) + lines[at]
    return b"".join(lines)


def _cut(chance: random.Random, text: bytes) -> bytes:
    return text[: chance.randrange(len(text) + 1)]


def _insert(chance: random.Random, text: bytes) -> bytes:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(INSERTED) + text[at:]


def _encode(chance: random.Random, text: bytes) -> bytes:
    codec = chance.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32"))
    return text.decode(errors="ignore").encode(codec, errors="replace")


INSERTED = (
    b"\x00|\x07|\xff|\t|: |- |{|]|'|\n---\n|\n...\n|%|!!python/object/apply:os.getcwd []|!!set {a}"
    b"|&a |*a |<<: {a: 1}\n|? |\ndefaults: 7\n|\ndefaults: .inf\n|\ndefaults: [7]\n"
    b"|\ndefaults: [{model: 1}]\n|\ndefaults: [/model: [a, b]]\n|\ndefaults: {a: b}\n"
    b"|\ndefaults: [null]\n|\n- a\n|# @package x\n"
).split(b"|")
TEXT_CHANGES = (_flip, _drop_line, _repeat_line, _indent_line, _cut, _insert, _insert, _encode)
