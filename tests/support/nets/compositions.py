"""Small modules of rows of written_rows.py, each trained by flowrun beside a plain torch loop.

    python tests/support/nets/compositions.py --seeds 0:200

A seed draws rows, a loss and an output; the script prints each that does not train as plain torch
and is not refused by an error with a place, and the rows of it that fail by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import linecache
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowrun.engine.capture.capture import Traced
from flowrun.engine.compile import Compilation
from flowrun.engine.errors import FlowrunError, RunError
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.models.sampling import sample_indices
from support.layouts.plain_loop import largest
from support.nets.written_rows import HEAD, IN_PLACE, LOSSES, MISTAKES, OUTPUTS, PARTS, PYTHON

ROWS = tuple("".join((IN_PLACE, PYTHON, PARTS)).replace("\n\n", "\n").strip().splitlines())
WRONG_ROWS, LOSS_ROWS = (tuple(text.strip().splitlines()) for text in (MISTAKES, LOSSES))
SAMPLES, BATCH, STEPS, SEED = 14, 8, 3, 1
LR, MOMENTUM, DECAY = 0.05, 0.9, 0.01
TOLERANCE = 1e-6  # relative, in fp64
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "data 2": ("placement.axes={data: 2}",),
    "tensor 2": ("placement.axes={tensor: 2}",),
    "stages 2": ("placement.stages=2",),
    "ZeRO 3": ("placement.axes={data: 2}", "zero.axis=data", "zero.stage=3", "zero.min_size=1"),
}
# words that are of no use to a user
NEVER = ("AOTInput", "AOTOutput", "INTERNAL ASSERT", "Observed exception", "a bug in flowrun")
RECIPE = f"""
defaults: [/optim: sgd, /launch: virtual]
model: {{_target_: mod.Net}}
data: {{_target_: mod.Samples}}
task: {{loss: {{_target_: mod.measure}}}}
optim: {{lr: {LR}, momentum: {MOMENTUM}, weight_decay: {DECAY}}}
sbp: {{"*.weight": {{tensor: S(0)}}}}
eval: {{fraction: 0.0, batches: 0}}
engine: {{cache: false}}
train: {{batch_size: {BATCH}, steps: {STEPS}, seed: {SEED}}}
"""
DATA = f"""
class Samples(torch.utils.data.Dataset):
    def __init__(self):
        n, g = {SAMPLES}, torch.Generator().manual_seed(3)
        self.x = torch.randn(n, 4, 6, generator=g, dtype=DTYPE)
        self.classes = torch.randint(6, (n, 4), generator=g)
        self.some = self.classes.masked_fill(torch.rand(n, 4, generator=g) < 0.3, -100)
        self.numbers = torch.randn(n, 4, 6, generator=g, dtype=DTYPE)

    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, i):
        fields = ("x", "classes", "some", "numbers")
        return {{name: getattr(self, name)[i] for name in fields}}
"""
_OWN_NAME = re.compile(r"(self\.|register_buffer\(\"|setattr\(self, ')([a-e])\b")


@dataclass(frozen=True)
class Model:
    """What a module is written of: rows of forward, a loss and an output."""

    rows: tuple[str, ...]
    loss: str = LOSS_ROWS[0]
    output: int = 0

    @property
    def micro_batches(self) -> int:
        """A mean over targets, of which micro-batches have unlike numbers, is one of all."""
        return 1 if re.search("some|> 0|ignore_index", self.loss) else 2

    @property
    def source(self) -> str:
        """A module `mod` of Net, measure and Samples."""
        made, logits, more = OUTPUTS[self.output]
        init, body = ["self.first = nn.Linear(6, 6)"], ["x = self.first(x)"]
        for k, row in enumerate(self.rows):
            before, _, lines = _OWN_NAME.sub(rf"\g<1>\g<2>{k}", row).rpartition(" :: ")
            init += before.split(" | ") if before else []
            body += [*lines.split(" | "), "x = x.tanh()"]
        fields = ", ".join(f'batch["{name}"]' for name in ("classes", "some", "numbers"))
        return "\n".join(
            (
                f"{HEAD}\n\nclass Net(nn.Module):\n    def __init__(self):",
                *_indented("super().__init__()", *init, "self.to(DTYPE)"),
                "\n    def forward(self, x):",
                *_indented(*body, f"return {made}"),
                "\n\ndef measure(output, batch):",
                f"    o, classes, some, numbers = {logits}, {fields}",
                f"    return {self.loss} + {more}\n\n{DATA}",
            )
        )


def _indented(*lines: str) -> list[str]:
    return [f"        {line}" for line in lines]


def model_of(seed: int) -> Model:
    rng = Random(seed)
    rows = tuple(rng.sample(ROWS, rng.choice((2, 3, 4, 6))))
    return Model(rows, rng.choice(LOSS_ROWS), rng.randrange(len(OUTPUTS)))


# ---- both sides ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Losses by step and weights by name."""

    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]

    def apart(self, other: Result) -> float:
        """The largest relative difference of a loss or a weight."""
        if self.weights.keys() != other.weights.keys():
            return math.inf
        losses = (torch.tensor(each.losses, dtype=torch.float64) for each in (self, other))
        pairs = [*zip(*losses, strict=True)]
        pairs += [(self.weights[name], weight) for name, weight in other.weights.items()]
        return largest(apart(a, b) for a, b in pairs)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = (torch.nan_to_num(v if v.is_complex() else v.double(), 1e300) for v in (a, b))
    return float((a - b).norm() / max(float(b.norm()), 1e-3)) if a.numel() else 0.0


@contextlib.contextmanager
def module_of(model: Model) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("mod.py").write_text(model.source)
        before = [*sys.path]
        sys.path.insert(0, folder)
        sys.modules.pop("mod", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        try:
            yield Path(folder)
        finally:
            sys.path[:] = before
            sys.modules.pop("mod", None)


def plain(model: Model) -> Result:
    """An ordinary torch loop over the module that can be imported."""
    import mod  # type: ignore[import-not-found]

    data, rows, losses = mod.Samples(), BATCH // model.micro_batches, []
    torch.manual_seed(SEED)
    net = mod.Net().train()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for first in range(step * BATCH, (step + 1) * BATCH, rows):
            chosen = sample_indices(SEED, range(first, first + rows), SAMPLES).tolist()
            batch = torch.utils.data.default_collate([data[index] for index in chosen])
            loss = mod.measure(net(batch["x"]), batch) / model.micro_batches
            loss.backward()
            total += loss.item()
        for p in parameters:
            p.grad = p.grad.to_dense() if p.grad is not None else None
        optimizer.step()
        losses.append(total)
    return Result(tuple(losses), {k: v.detach().clone() for k, v in net.state_dict().items()})


@cache
def _recipe(layout: str, micro_batches: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "recipe.yaml").write_text(RECIPE)
        words = (f"recipe={file}", f"train.micro_batches={micro_batches}", *LAYOUTS[layout])
        return load([*words])


def _trained(model: Model, layout: str, folder: Path) -> Result:
    from safetensors.torch import load_file

    run(_recipe(layout, model.micro_batches), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row and "step_s" in row]
    numbers = tuple(math.nan if loss is None else float(loss) for loss in losses)
    return Result(numbers, load_file(folder / "weights.safetensors"))


# ---- verdicts ------------------------------------------------------------------------------------

EQUAL, REFUSED = "equal", "refused"


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Within, one model is traced once: what torch captures of it is the same in every layout."""
    usual, kept = vars(Compilation)["traced"], []

    def traced(story: Compilation) -> Traced:
        kept[:] = kept or [usual.func(story)]
        return kept[0]

    Compilation.traced = property(traced)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Compilation.traced = usual  # type: ignore[method-assign]


def outcome(model: Model, layout: str) -> str:
    """How flowrun trains it in a layout: EQUAL, REFUSED, or what is wrong."""
    with module_of(model) as folder, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        expected = _tried(lambda: plain(model))
        sys.modules.pop("mod", None)
        found = _tried(lambda: _trained(model, layout, folder / "run"))
    if isinstance(found, FlowrunError):
        return _judged(found, expected)
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    if isinstance(expected, Exception):
        return f"trains, and plain torch does not: {expected}"
    apart = found.apart(expected)
    return EQUAL if apart <= TOLERANCE else f"{apart:.1e} apart"


def _tried(make: Callable[[], Result]) -> Result | Exception:
    try:
        with contextlib.redirect_stdout(None):
            return make()
    except Exception as error:
        return error


def _judged(error: FlowrunError, expected: Result | Exception) -> str:
    """A refusal names a place, comes before the first step, and is in the user's words."""
    finite = isinstance(expected, Result) and all(map(math.isfinite, expected.losses))
    late = isinstance(error, RunError) and finite
    unclear = not error.where.strip() or any(word in str(error) for word in NEVER)
    return f"refused badly: {error}" if late or unclear else REFUSED


def wrong_rows(model: Model, layout: str) -> list[str]:
    alone = {row: outcome(Model((row,)), layout) for row in model.rows}
    return [f"{row}: {said}" for row, said in alone.items() if said != EQUAL]


def faults(models: Sequence[Model], layout: str, allowed: Sequence[str] = (EQUAL,)) -> list[str]:
    """What is wrong with models in a layout, with the rows that it comes from."""
    said = [(model, outcome(model, layout)) for model in models]
    return [
        "\n".join((layout, what, model.loss, *wrong_rows(model, layout)))
        for model, what in said
        if what not in allowed
    ]


def main() -> int:
    """Try the models of seeds in all layouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="a:b")
    first, _, last = parser.parse_args().seeds.partition(":")
    torch.set_num_threads(1)
    count = 0
    for seed in range(int(first), int(last)):
        for layout in LAYOUTS:
            for fault in faults([model_of(seed)], layout):
                count += 1
                print(f"{seed} {fault}", flush=True)
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
