# ruff: noqa: E501 (rows of tables)
"""Random small modules, each trained by flowrun in five layouts beside a plain torch loop.

    python tests/support/nets/random_models.py --seeds 0:200 [--layouts single,data2] [--shrink] [--show 17]

A seed is a model: mod.py (module, loss, data set) and recipe.yaml, which the real command can run
(--show writes both).  It must train as plain torch trains it, or be refused by an error that has a
place; the script prints a line for each that does not, and how many of what there were.  --shrink
leaves out blocks of it as long as it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import functools
import gc
import importlib
import inspect
import io
import itertools
import json
import linecache
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowrun.engine import compile as story
from flowrun.engine.errors import FlowrunError, RunError
from flowrun.launcher.data.sampler import sample_indices
from flowrun.launcher.job import forked, job_plans
from flowrun.launcher.recipe.compose import compose, freeze, resolve
from flowrun.launcher.recipe.key_trees import change_keys
from flowrun.launcher.run import run
from support.nets.random_blocks import BLOCKS, Shape, Skip, Writer, candidates
from support.nets.random_extras import EXTRAS, MORE_MISTAKES, extra_heads
from support.nets.random_heads import (
    LOSS_MODULES,
    MISTAKES,
    OUTPUT_TOPS,
    OUTPUTS,
    head,
)

SAMPLES = 14
EXTRA_FROM = 2000  # seeds from here on draw from random_extras.py, too
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "data2": ("placement.axes={data: 2}",),
    "tensor2": ("placement.axes={tensor: 2}",),
    "stages2": ("placement.stages=2",),
    "zero3": ("placement.axes={data: 2}", "zero.axis=data", "zero.stage=3", "zero.min_size=1"),
    "auto": ("placement.axes={data: 2, tensor: 2}", "parallel=auto"),
}
FIVE = tuple(LAYOUTS)[:5]
TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 2e-2}
_MODELS = itertools.count()
NEVER = (
    "AOTInput",
    "AOTOutput",
    "INTERNAL ASSERT",
    "Observed exception",
    "a bug in flowrun",
)


@dataclass(frozen=True)
class Model:
    """A seed's.  blocks: their names, in order.  used: rows of tables too.  mistake: what it does
    that flowrun may refuse; "" of most.
    """

    seed: int
    source: str
    recipe: dict[str, Any]
    blocks: tuple[str, ...]
    used: frozenset[str]
    mistake: str = ""

    def __hash__(self) -> int:
        return hash(self.source)

    @property
    def dtype(self) -> str:
        return self.source.split("DTYPE = torch.", 1)[1].split("\n", 1)[0]


def model_of(seed: int, keep: Sequence[int] | None = None) -> Model:
    """The model of a seed.  keep: of its blocks only these, by their places."""
    return _Composer(seed, keep).model()


class _Composer:
    """Draws a model: each part has random numbers of its own, so that others can be left out."""

    def __init__(self, seed: int, keep: Sequence[int] | None) -> None:
        self.seed, self.keep = seed, keep
        self.is_extra = seed >= EXTRA_FROM
        self.tops: dict[str, str] = {}
        self.used: list[str] = []
        self.blocks: list[str] = []
        self.rng = self._rng("whole")
        self.w = Writer(self._rng("net"), self.tops, self.used)
        self.w.names |= {"training", "forward"}

    def _rng(self, part: object) -> Random:
        return Random(f"{self.seed}/{part}")

    def model(self) -> Model:
        rng = self.rng
        dtype = rng.choices(["float32", "float64", "bfloat16"], [0.5, 0.4, 0.1])[0]
        shape, fields, arguments = self._input()
        places = range(rng.choice([1, 2, 2, 3, 3, 4, 5]))
        mistakes = [*MISTAKES, *MORE_MISTAKES] if self.is_extra else list(MISTAKES)
        mistake = rng.choice(mistakes) if rng.random() < 0.08 else ""
        at = rng.randrange(len(places))
        for place in places:
            if self.keep is None or place in self.keep:
                shape = self._block(place, shape, depth=0)
            if mistake and place == at:
                self._mistake(mistake, shape)
        return self._finished(dtype, shape, fields, arguments, mistake)

    # ---- the start ----

    def _input(self) -> tuple[Shape, dict[str, str], list[str]]:
        w, rng = self.w, self.rng
        kind = rng.choice(
            ["features", "features", "tokens", "tokens", "sequence", "image", "image"]
        )
        arguments = ["x"]
        if kind == "tokens":
            t, c, v = rng.choice([3, 4, 5, 6]), rng.choice([4, 6, 8]), rng.choice([7, 11, 12])
            fields = {"x": f"torch.randint({v}, (n, {t}), generator=g)"}
            more = rng.choice(["", "", ", padding_idx=0", ", scale_grad_by_freq=False"])
            shape: Shape = (t, c)
            how = rng.choice(["embed", "embed", "functional", "index", "one_hot", "bag"])
            if how in ("embed", "bag"):
                if how == "bag" and rng.random() < 0.5:
                    w.layer(
                        "bag", f"nn.EmbeddingBag({v}, {c}, mode={rng.choice(['sum', 'mean'])!r})"
                    )
                    shape = (c,)
                else:
                    w.layer("embed", f"nn.Embedding({v}, {c}{more})")
            else:
                p = w.parameter("table", f"torch.randn({v}, {c})")
                w.do(
                    {
                        "functional": f"x = F.embedding(x, self.{p})",
                        "index": f"x = self.{p}[x]",
                    }.get(how, f"x = F.one_hot(x, {v}).to(self.{p}.dtype) @ self.{p}")
                )
            self.used.append(f"tokens {how}")
        else:
            shape = {
                "features": (rng.choice([4, 5, 6, 8, 12]),),
                "sequence": (rng.choice([2, 3, 4, 6]), rng.choice([3, 4, 6, 8])),
                "image": (rng.choice([1, 2, 3, 4]), *(rng.choice([4, 5, 6, 8]),) * 2),
            }[kind]
            dims = ", ".join(map(str, shape))
            fields = {"x": f"torch.randn(n, {dims}, generator=g, dtype=torch.float64).to(DTYPE)"}
            if rng.random() < 0.15 and kind == "image":
                fields = {"x": f"torch.randint(256, (n, {dims}), generator=g, dtype=torch.uint8)"}
                w.do("x = x.to(DTYPE) / 255")
        more = rng.random()
        if more < 0.12 and len(shape) == 2:
            t = shape[0]
            fields["mask"] = f"torch.rand(n, {t}, generator=g) < 0.7"
            arguments.append("mask")
            w.do(
                rng.choice(
                    [
                        "x = x * mask.unsqueeze(-1)",
                        "x = x.masked_fill(~mask[..., None], 0.0)",
                        "x = x + torch.where(mask, 0.0, -1.0).to(x.dtype)[..., None]",
                        "x = torch.cat([x * mask[..., None], x[:, :1]], 1)[:, 1:]",
                    ]
                )
            )
        elif more < 0.2:
            fields["more"] = "torch.randn(n, 3, generator=g, dtype=torch.float64).to(DTYPE)"
            arguments.append("more" if rng.random() < 0.5 else "more=None")
            a = w.made("mix", f"nn.Linear(3, {shape[-1]})")
            ones = ", ".join(["1"] * (len(shape) - 1) + [str(shape[-1])])
            w.do(f"x = x + self.{a}(more).view(-1, {ones})")
        elif more < 0.26 and len(shape) == 1:
            fields["scale"] = "torch.rand(n, generator=g, dtype=torch.float64).to(DTYPE)"
            arguments.append("scale")
            w.do("x = x * (1 + scale)[:, None]")
        if rng.random() < 0.05:
            fields["unused"] = "torch.arange(n)"
        return shape, fields, arguments

    # ---- blocks ----

    def _block(self, place: object, shape: Shape, depth: int) -> Shape:
        rng = self._rng(place)
        self.w.rng, before = rng, self.w.rng
        try:
            if depth < 2 and rng.random() < (0.3 if depth == 0 else 0.1):
                return self._nested(place, shape, depth)
            return self._simple(shape)
        finally:
            self.w.rng = before

    def _simple(self, shape: Shape, keeps: bool = False) -> Shape:
        w = self.w
        for _ in range(30):
            name, found_in = w.rng.choice(candidates(len(shape))), BLOCKS
            if self.is_extra and w.rng.random() < 0.7:
                found_in = EXTRAS
                name = w.rng.choice([k for k, (dims, _) in EXTRAS.items() if len(shape) in dims])
            saved = copy.deepcopy((w.init, w.body, w.names)), list(self.used), dict(self.tops)
            try:
                found = found_in[name][1](w, shape)
                good = math.prod(found) <= 400 and (not keeps or found == shape)
            except Skip:
                good = False
            if good:
                self.blocks.append(name)
                self.used.append(name)
                return found
            (w.init, w.body, w.names), used, tops = saved
            self.used[:] = used
            self.tops.clear()
            self.tops.update(tops)
        return shape

    def _nested(self, place: object, shape: Shape, depth: int) -> Shape:
        """Blocks within a module of their own: called, repeated, or added to what enters."""
        outer, rng = self.w, self.w.rng
        how = rng.choice(
            ["plain", "residual", "list", "dict", "sequential", "twice", "branch", "inline"]
        )
        self.used.append(f"nested {how}")
        self.w = inner = Writer(rng, self.tops, self.used)
        inner.names |= {"training", "forward"}
        keeps, found = how in ("residual", "list", "twice", "branch", "dict", "inline"), shape
        for k in range(rng.choice([1, 2, 3])):
            inner.rng = self._rng(f"{place}.{k}")
            found = (
                self._simple(found, keeps)
                if depth
                else self._block_within(f"{place}.{k}", found, keeps, depth)
            )
        self.w = outer
        name = f"Block{len([t for t in self.tops if t.startswith('Block')])}"
        argument = rng.choice(["x", "x", "x, scale=1.0"])
        inner.body = inner.body or ["x = x * 1.0"]
        self.tops[name] = _class(
            name, inner, argument, ["return x" if argument == "x" else "return x * scale"]
        )
        n, w = rng.choice([2, 3, 4]), self.w
        if how in ("plain", "sequential"):
            w.layer(
                "block",
                f"{name}()" if how == "plain" else f"nn.Sequential({name}(), nn.Identity())",
            )
        elif how == "residual":
            w.layer("block", f"{name}()", "x = x + self.{0}(x)")
        elif how == "list":
            a = w.made("blocks", f"nn.ModuleList([{name}() for _ in range({n})])")
            w.do(f"for block in self.{a}:", "    x = x + 0.5 * block(x)")
        elif how == "dict":
            a = w.made("parts", f'nn.ModuleDict({{"a": {name}(), "b": {name}()}})')
            w.do(f'x = self.{a}["a"](x) - self.{a}["b"](x.tanh())')
        elif how == "twice":
            w.layer("block", f"{name}()", "x = self.{0}(self.{0}(x))")
        elif how == "inline":
            w.layer("block", f"nn.Sequential(*[{name}() for _ in range({n})])")
        else:
            a = w.made("block", f"{name}()")
            flag = w.made("deep", repr(rng.random() < 0.7))
            w.do(f"x = self.{a}(x) if self.{flag} else x")
        return found

    def _block_within(self, place: str, shape: Shape, keeps: bool, depth: int) -> Shape:
        if keeps:
            return self._simple(shape, keeps=True)
        return self._block(place, shape, depth + 1)

    def _mistake(self, mistake: str, shape: Shape) -> None:
        init, *lines = (
            line.replace("{n}", str(shape[-1])) for line in (MISTAKES | MORE_MISTAKES)[mistake]
        )
        if init != "pass":
            self.w.init.append(init)
        if mistake == "global":
            self.tops["CALLS"] = "CALLS = 0\n"
        if mistake == "lru_cache":
            self.tops["table"] = "@functools.lru_cache\ndef table(n):\n    return torch.arange(n)\n"
        self.w.do(*lines)
        self.used.append(f"mistake {mistake}")

    # ---- the end ----

    def _finished(
        self, dtype: str, shape: Shape, fields: dict[str, str], arguments: list[str], mistake: str
    ) -> Model:
        w, rng = self.w, self._rng("end")
        w.rng = rng
        if rng.random() < 0.6:
            out = rng.choice([3, 4, 5])
            w.layer("head", f"nn.Linear({shape[-1]}, {out})")
            shape = (*shape[:-1], out)
        else:  # there is always something to train
            w.do(f"x = x * self.{w.parameter('gain', f'torch.ones({shape[-1]})')}")
        found = head(w, shape)
        if self.is_extra and rng.random() < 0.4:
            found = rng.choice(extra_heads(w, shape))
        modules = LOSS_MODULES | ({found.loss: found.module} if found.module else {})
        own = rng.random() < 0.12 and found.loss not in modules
        if found.loss.startswith("own: "):
            own, found = True, replace(found, loss=f"self.{found.loss[5:]}(o, y).loss")
        output = rng.choice([*OUTPUTS, "tensor", "tensor"])
        lines, logits, aux = OUTPUTS[output]
        self.used.append(f"output {output}")
        self.tops |= {output: OUTPUT_TOPS[output]} if output in OUTPUT_TOPS and not own else {}
        if own:
            arguments = (
                [*arguments, "y"] if not arguments[-1].endswith("None") else [*arguments, "y=None"]
            )
            end = rng.choice(["return loss", "return Result(loss=loss, logits=o)"])
            if "Result" in end:
                self.tops["Result"] = (
                    "@dataclass\nclass Result:\n    loss: torch.Tensor\n    logits: torch.Tensor = None\n"
                )
            w.body.insert(0, "labels = y")  # blocks have a `y` of their own
            ends = ["o = x", "loss = " + re.sub(r"\by\b", "labels", found.loss), end]
            self.used.append(f"own loss {end}")
        else:
            ends = [lines]
        w.init.append("self.to(DTYPE)")
        classes = _class("Net", w, ", ".join(arguments), ends)
        functions = ""
        recipe_loss: dict[str, Any] = {"_target_": "mod.measure"}
        if not own:
            functions = f"def logits_of(output):\n    return {logits}\n\n\ndef aux_of(output):\n    return {aux}\n\n\n"
            if found.loss in modules:
                name, text = modules[found.loss]
                functions += text.strip() + "\n\n\n"
                recipe_loss = {"_target_": f"mod.{name}"}
            else:
                functions += f'def measure(output, batch):\n    o, y = logits_of(output), batch["y"]\n    return {found.loss} + aux_of(output)\n\n\n'
        fields = {**fields, "y": found.target}
        source = "\n\n".join(
            [
                HEAD.replace("DTYPE_", dtype),
                *(t.strip("\n") + "\n" for t in self.tops.values()),
                classes,
                functions.strip("\n") + "\n",
                _data(fields, rng),
            ]
        )
        task: dict[str, Any] = {} if own else {"loss": recipe_loss}
        recipe = self._recipe(task, found.counted, rng)
        return Model(self.seed, source, recipe, tuple(self.blocks), frozenset(self.used), mistake)

    def _recipe(self, task: dict[str, Any], counted: bool, rng: Random) -> dict[str, Any]:
        micro = rng.choice([1, 1, 2])
        size = rng.choice([4, 4, 6, 8, 12] if micro == 1 else [4, 8, 12])
        if counted:
            micro = 1
        name = rng.choice(["sgd", "adamw"])
        optim: dict[str, Any] = {
            "lr": 0.05,
            "momentum": rng.choice([0.0, 0.9]),
            "weight_decay": rng.choice([0.0, 0.01]),
        }
        if optim["momentum"] and rng.random() < 0.3:
            optim["nesterov"] = True
        if name == "adamw":
            optim = {
                "lr": 0.003,
                "weight_decay": rng.choice([0.0, 0.1]),
                "eps": 1e-6,
                "clip_norm": 0.0,
            }
        clip = rng.random()
        if clip < 0.25:
            optim["clip_norm"] = 0.5
        elif clip < 0.35:
            optim["clip_value"] = 0.01
        return {
            "defaults": [{"/optim": name}, {"/launch": "virtual"}],
            "model": {"_target_": "mod.Net"},
            "data": {"_target_": "mod.Samples"},
            "task": task,
            "optim": optim,
            "eval": {"fraction": 0.0, "batches": 0},
            "train": {
                "batch_size": size,
                "micro_batches": micro,
                "steps": 3,
                "seed": self.seed % 7,
            },
        }


HEAD = """import copy
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = torch.DTYPE_
"""


def _class(name: str, w: Writer, arguments: str, ends: Sequence[str]) -> str:
    def indented(lines: Sequence[str]) -> str:
        return "\n".join(f"        {line}" for line in lines)

    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{indented(w.init)}\n\n    def forward(self, {arguments}):\n{indented([*w.body, *ends])}\n"
    )


def _data(fields: Mapping[str, str], rng: Random) -> str:
    made = "\n".join(f"        self.{name} = {text}" for name, text in fields.items())
    item = ", ".join(f'"{name}": self.{name}[i]' for name in fields)
    if rng.random() < 0.1 and "randint" in fields["y"] and "(n,)" in fields["y"]:
        item = (
            item.replace("self.y[i]", "int(self.y[i])") if "to(DTYPE)" not in fields["y"] else item
        )
    return (
        "class Samples(torch.utils.data.Dataset):\n    def __init__(self):\n"
        f"        n, g = {SAMPLES}, torch.Generator().manual_seed({rng.randrange(100)})\n{made}\n\n"
        f"    def __len__(self):\n        return {SAMPLES}\n\n"
        f"    def __getitem__(self, i):\n        return {{{item}}}\n"
    )


# ---- plain torch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """reached: parameters that have a gradient."""

    losses: tuple[float, ...]
    weights: Mapping[str, torch.Tensor]
    reached: tuple[str, ...] = ()


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The working directory, with a `mod` of its own."""
    before, path, flag = os.getcwd(), list(sys.path), sys.dont_write_bytecode
    sys.modules.pop("mod", None)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    linecache.clearcache()
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:], sys.dont_write_bytecode = path, flag
        sys.modules.pop("mod", None)


def written(model: Model, folder: Path, wide: bool = False) -> Path:
    """The folder, with mod.py and recipe.yaml.  wide: everything in fp64."""
    source = model.source
    if wide:
        source = source.replace(f"DTYPE = torch.{model.dtype}", "DTYPE = torch.float64")
    (folder / "mod.py").write_text(source)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(model.recipe, sort_keys=False))
    return folder


def plain(model: Model, wide: bool = False, moved: bool = False) -> Trained:
    """The model in an ordinary torch loop.  wide: in fp64.  moved: it begins a rounding away, with
    rates of fp32, which flowrun feeds: what diverges makes much of both.
    """
    recipe = {key: value for key, value in model.recipe.items() if key != "sbp"}
    if moved:
        recipe["optim"] = _narrow_rates(recipe["optim"])
    return _trained(replace(model, recipe={}), json.dumps(recipe), wide, moved)


def _narrow_rates(optim: Mapping[str, Any]) -> dict[str, Any]:
    """With each lr, of groups too, rounded to fp32."""
    groups = {k: _narrow_rates(keys) for k, keys in optim.get("groups", {}).items()}
    rate = {"lr": float(torch.tensor(optim["lr"]))} if "lr" in optim else {}
    return {**optim, **rate, **({"groups": groups} if groups else {})}


@functools.lru_cache(maxsize=4)
def _trained(model: Model, recipe: str, wide: bool, moved: bool) -> Trained:
    with (
        tempfile.TemporaryDirectory() as folder,
        inside(written(model, Path(folder), wide)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _plain(json.loads(recipe), moved)


def _plain(recipe: Mapping[str, Any], moved: bool) -> Trained:
    import mod

    train, optim = recipe["train"], recipe["optim"]
    data = mod.Samples()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(train["seed"])
        model = mod.Net()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in parameters if moved else ():
            signs = torch.arange(p.numel()).view(p.shape) % 2 * 2 - 1
            p.mul_((1 + torch.finfo(p.dtype).eps * signs).to(p.dtype))
    loss_fn = None
    if recipe["task"]:
        loss_fn = getattr(mod, recipe["task"]["loss"]["_target_"].removeprefix("mod."))
        if inspect.isclass(loss_fn):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(train["seed"])
                loss_fn = loss_fn()
            parameters += [p for p in loss_fn.parameters() if p.requires_grad]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_group = {id(p): _keys_of(name, optim) for name, p in named.items()}
    for p in parameters:
        p.requires_grad_(not of_group.get(id(p), {}).get("frozen", False))
    parameters = [p for p in parameters if p.requires_grad]
    averages = {name: p.detach().clone() for name, p in named.items() if p.requires_grad}
    takes = inspect.signature(model.forward).parameters
    names = [name for name in takes if name in data[0]]
    rated = [{"params": [p], **of_group.get(id(p), {})} for p in parameters]
    for group in rated:
        group.pop("frozen", None)
    optimizer = _optimizer(next(iter(recipe["defaults"][0].values())), optim, rated)
    schedule = optim.get("schedule")
    scheduler = schedule and torch.optim.lr_scheduler.StepLR(
        optimizer, schedule["step_size"], schedule["gamma"]
    )
    rows, losses = train["batch_size"] // train["micro_batches"], []
    for step in range(train["steps"]):
        optimizer.zero_grad()
        total = 0.0
        for k in range(train["micro_batches"]):
            first = step * train["batch_size"] + k * rows
            chosen = sample_indices(train["seed"], range(first, first + rows), len(data)).tolist()
            batch = torch.utils.data.default_collate([data[index] for index in chosen])
            output = model(**{name: batch[name] for name in names})
            if loss_fn is not None:
                loss = loss_fn(output, batch)
            else:
                loss = output if isinstance(output, torch.Tensor) else output.loss
            (loss / train["micro_batches"]).backward()
            total += loss.item() / train["micro_batches"]
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        if optim.get("clip_value"):
            torch.nn.utils.clip_grad_value_(parameters, optim["clip_value"])
        if optim.get("clip_norm"):
            torch.nn.utils.clip_grad_norm_(parameters, optim["clip_norm"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        for name, average in averages.items():
            average.lerp_(named[name].detach(), 1 - optim.get("ema", 0.0))
        losses.append(total)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if optim.get("ema"):
        state |= {f"ema/{name}": average for name, average in averages.items()}
    reached = tuple(name for name, p in model.named_parameters() if p.grad is not None)
    return Trained(tuple(losses), state, reached)


def _keys_of(name: str, optim: Mapping[str, Any]) -> dict[str, Any]:
    """What the groups say of a parameter."""
    out: dict[str, Any] = {}
    for pattern, keys in optim.get("groups", {}).items():
        out |= keys if fnmatch.fnmatchcase(name, pattern) else {}
    return out


def _optimizer(name: str, optim: Mapping[str, Any], parameters: list[Any]) -> Any:
    if not parameters:
        return torch.optim.SGD([torch.zeros(1)], lr=0.0)
    if name == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=optim["lr"],
            betas=(0.9, 0.95),
            eps=optim["eps"],
            weight_decay=optim["weight_decay"],
            foreach=False,
        )
    more = {"nesterov": optim.get("nesterov", False), "foreach": False}
    return torch.optim.SGD(
        parameters,
        lr=optim["lr"],
        momentum=optim["momentum"],
        weight_decay=optim["weight_decay"],
        **more,
    )


# ---- flowrun -------------------------------------------------------------------------------------


def pins(model: Model) -> dict[str, Any]:
    """Some parameters split on the axis tensor, by names and dims that fit."""
    rng, trained = Random(f"{model.seed}/pins"), plain(model)
    shapes = {name: tuple(trained.weights[name].shape) for name in trained.reached}
    return {
        name: {"tensor": f"S({rng.choice(dims)})"}
        for name, shape in shapes.items()
        if (dims := [d for d, n in enumerate(shape) if n > 1]) and rng.random() < 0.6
    }


def with_pins(model: Model) -> Model:
    """With what a recipe says of parameters by their names."""
    try:
        optim = {**model.recipe["optim"], **(groups(model) if model.seed >= EXTRA_FROM else {})}
        return replace(model, recipe={**model.recipe, "sbp": pins(model), "optim": optim})
    except Exception:  # of plain torch, which is asked again
        return model


def groups(model: Model) -> dict[str, Any]:
    """Rates of their own, or frozen, of some parameters; a schedule and averages."""
    rng, names = Random(f"{model.seed}/groups"), plain(model).reached
    out: dict[str, Any] = {}
    if rng.random() < 0.3:
        keys = [
            {"lr": 0.01},
            {"weight_decay": 0.05},
            {"frozen": True},
            {"lr": 0.02, "weight_decay": 0.0},
        ]
        chosen = rng.sample(names, min(len(names), rng.choice([1, 2])))
        patterns = [name if rng.random() < 0.5 else name.split(".")[0] + "*" for name in chosen]
        out["groups"] = {pattern: rng.choice(keys) for pattern in patterns}
    if rng.random() < 0.2:
        out["schedule"] = {"name": "StepLR", "step_size": 1, "gamma": 0.5}
    if rng.random() < 0.2:
        out["ema"] = 0.5
    return out


def recipe_in(model: Model, layout: str) -> Any:
    """The model's recipe in a layout: what `load` makes of recipe.yaml (a test compares), in a
    fiftieth of the time.  Raises RecipeError.
    """
    given = model.recipe
    keys = {key: given[key] for key in ("model", "data", "task", "optim", "train")}
    tree = _template(next(iter(given["defaults"][0].values())), layout)
    return freeze(change_keys(tree, {**keys, "sbp": given.get("sbp", {})}))


@functools.cache
def _template(optim: str, layout: str) -> Any:
    """All keys that a model does not say."""
    given = {**model_of(0).recipe, "defaults": [{"/optim": optim}, {"/launch": "virtual"}]}
    given = {key: value for key, value in given.items() if key not in ("optim", "task")}
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        Path("recipe.yaml").write_text(yaml.safe_dump(given))
        return resolve(compose(["recipe=recipe.yaml", "engine.cache=false", *LAYOUTS[layout]]))


@dataclass(frozen=True)
class Outcome:
    """kind: equal, refused (or stopped where plain torch's loss is not finite), silent, traceback, midrun, unlocated, unplain (plain torch fails, and
    flowrun trains), broken (plain torch fails and flowrun refuses).
    """

    layout: str
    kind: str
    what: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind not in ("equal", "refused", "broken")


@dataclass
class Reference:
    """Plain torch, and plain torch in fp64, which is run where it is asked for."""

    model: Model
    error: str = ""

    def __post_init__(self) -> None:
        try:
            self.trained = plain(self.model)
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error)[:200]}"

    @functools.cached_property
    def wide(self) -> Trained | None:
        try:
            return plain(self.model, wide=True)
        except Exception:
            return None

    @functools.cached_property
    def moved(self) -> Trained:
        return plain(self.model, moved=True)

    def difference(self, found: Trained) -> str:
        """What differs; "" if nothing."""
        tolerance = TOLERANCE[self.model.dtype]
        apart = _differences(found, self.trained)
        over = {name: off for name, off in apart.items() if not off <= tolerance}
        if over and self.wide is not None:
            # what rounding does to it: a gradient that cancels out, a division by next to nothing
            mine, theirs = _differences(found, self.wide), _differences(self.trained, self.wide)
            moved = _differences(self.moved, self.trained)
            most = {k: 10 * max(theirs[k], moved[k]) + tolerance for k in over}
            over = {k: v for k, v in over.items() if not mine[k] <= most[k]}
        worst = sorted(over.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {off:.1e}" for name, off in worst[:3])


def _differences(found: Trained, right: Trained) -> dict[str, float]:
    """Relative; of weights by their norms.  Losses by step, weights by name."""
    out = {}
    for step, (a, b) in enumerate(zip(found.losses, right.losses, strict=True)):
        out[f"loss of step {step}"] = _apart(torch.tensor(a), torch.tensor(b))
    for name, b in right.weights.items():
        a = found.weights.get(name)
        out[name] = math.inf if a is None or a.shape != b.shape else _apart(a, b)
    return out


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    if not a.numel():
        return 0.0
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    seen = b.isfinite()
    a, b = a[seen], b[seen]
    return float((a - b).norm() / max(float(b.norm()), 1e-3))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is looked for once in a few models: torch's own objects are so many that to look
    among them again and again takes most of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if next(_MODELS) % 8 == 0:
            gc.collect()
            gc.freeze()


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """All layouts of one model are planned from one capture, which is checked once: neither knows
    of layouts.
    """
    capture, check = story.trace, job_plans.JobPlans._compare
    story.trace = _once(capture)  # type: ignore[assignment]
    job_plans.JobPlans._compare = _once(  # type: ignore[method-assign]
        lambda self: forked.run_in_fork(lambda: check(self))
    )
    start, job_plans.start_fork = job_plans.start_fork, _here
    try:
        yield
    finally:
        story.trace, job_plans.start_fork = capture, start
        job_plans.JobPlans._compare = check  # type: ignore[method-assign]


@contextlib.contextmanager
def _here(make: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """forked.start_fork, without a process."""
    yield make


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """What it makes, or raises, at its first call."""
    kept: list[Any] = []

    def once(*args: Any) -> Any:
        if not kept:
            try:
                kept.append(make(*args))
            except FlowrunError as error:
                kept.append(error)
        if isinstance(kept[0], FlowrunError):
            raise kept[0]
        return kept[0]

    return once


def outcomes(model: Model, layouts: Sequence[str] = FIVE, *, shares: bool = True) -> list[Outcome]:
    """How flowrun trains it in each layout, judged.  shares: captured_once."""
    shared = captured_once() if shares else contextlib.nullcontext()
    with uncollected(), shared:
        return _outcomes(with_pins(model), layouts)


def _outcomes(model: Model, layouts: Sequence[str]) -> list[Outcome]:
    reference = Reference(model)
    found = []
    with tempfile.TemporaryDirectory() as folder, inside(written(model, Path(folder))):
        for layout in layouts:
            sys.modules.pop("mod", None)
            found.append(_outcome(model, layout, Path(folder) / "runs" / layout, reference))
    return found


def _outcome(model: Model, layout: str, folder: Path, reference: Reference) -> Outcome:
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said):
            warnings.simplefilter("ignore")
            run(recipe_in(model, layout), folder)
    except RunError as error:
        stops = not (reference.error or all(map(math.isfinite, reference.trained.losses)))
        kind = "refused" if stops else "broken" if reference.error else "midrun"
        return Outcome(layout, kind, _short(str(error)))
    except FlowrunError as error:
        text = str(error)
        if not error.where.strip() or any(word in text for word in NEVER):
            return Outcome(layout, "unlocated", _short(text))
        return Outcome(layout, "broken" if reference.error else "refused", _short(text))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        return Outcome(
            layout, "traceback", f"{type(error).__name__} at {where}: {_short(str(error))}"
        )
    if reference.error:
        return Outcome(layout, "unplain", reference.error)
    told = reference.difference(_read(folder))
    return Outcome(layout, "silent" if told else "equal", told)


def wrong_ones(seeds: Sequence[int]) -> list[str]:
    """Those that train otherwise or are not refused by name, each in two layouts in turn."""
    return [
        f"{seed} {each.layout}: {each.kind}: {each.what}"
        for k, seed in enumerate(seeds)
        for each in outcomes(model_of(seed), (FIVE[k % 5], FIVE[(k + 2) % 5]))
        if each.is_wrong
    ]


def _read(folder: Path) -> Trained:
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row and "step_s" in row]
    numbers = tuple(math.nan if loss is None else float(loss) for loss in losses)
    weights = load_file(folder / "weights.safetensors")
    if (folder / "ema.safetensors").exists():
        averages = load_file(folder / "ema.safetensors")
        weights |= {f"ema/{name}": value for name, value in averages.items()}
    return Trained(numbers, weights)


def _short(text: str) -> str:
    said = " / ".join(line.strip() for line in text.strip().splitlines())
    return said if len(said) < 400 else said[:330] + " … " + said[-60:]


def shrunk(seed: int, layout: str, kind: str) -> Model:
    """The seed's model with as few of its blocks as fail likewise in a layout."""
    model = model_of(seed)
    keep = list(range(8))
    for place in reversed(range(8)):
        fewer = [k for k in keep if k != place]
        try:
            smaller = model_of(seed, fewer)
            if [o.kind for o in outcomes(smaller, [layout])] == [kind]:
                model, keep = smaller, fewer
        except Exception:
            continue
    return model


# ---- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:20", help="a:b, or a,b,c")
    parser.add_argument("--layouts", default=",".join(FIVE))
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--show", type=int, help="write mod.py and recipe.yaml of a seed to --to")
    parser.add_argument("--to", type=Path, default=Path("build/random_model"))
    parser.add_argument("--keep", help="of --show: places of the blocks that stay")
    parser.add_argument("--refused", action="store_true", help="print refusals too")
    parser.add_argument("--log", type=Path, help="append a line of JSON for each model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.show is not None:
        keep = [int(k) for k in given.keep.split(",") if k] if given.keep is not None else None
        given.to.mkdir(parents=True, exist_ok=True)
        written(with_pins(model_of(given.show, keep)), given.to)
        print(given.to)
        return 0
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else [int(s) for s in first.split(",")]
    counts: Counter[str] = Counter()
    begun = time.process_time()
    for seed in seeds:
        counts += _one(seed, given)
    each = (time.process_time() - begun) / max(1, len(seeds))
    print(f"{len(seeds)} models, {each:.1f} s of CPU each: {dict(counts)}")
    return (
        1
        if any(counts[kind] for kind in ("silent", "traceback", "unlocated", "midrun", "unplain"))
        else 0
    )


def _one(seed: int, given: argparse.Namespace) -> Counter[str]:
    try:
        model = model_of(seed)
        layouts = given.layouts.split(",") + (
            ["auto"] if seed % 10 == 3 and "single" in given.layouts else []
        )
        found = outcomes(model, layouts)
    except Exception as error:
        traceback.print_exc()
        print(f"{seed} harness: {type(error).__name__}: {error}", flush=True)
        return Counter(harness=1)
    for each in found:
        if each.is_wrong or (given.refused and each.kind in ("refused", "broken")):
            text = f"{seed} {each.layout} {each.kind.upper()}: {each.what}"
            if given.shrink and each.is_wrong:
                text += f" | {shrunk(seed, each.layout, each.kind).blocks}"
            print(f"{text} [{model.mistake or model.dtype}]", flush=True)
    if given.log:
        with given.log.open("a") as file:
            rows = [(each.layout, each.kind, each.what) for each in found]
            file.write(json.dumps({"seed": seed, "mistake": model.mistake, "found": rows}) + "\n")
    return Counter(each.kind for each in found)


if __name__ == "__main__":
    sys.exit(main())
