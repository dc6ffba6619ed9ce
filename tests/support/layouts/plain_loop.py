"""What the tests train, and the plain torch loop that says what must come out.

The loop is autograd and torch.optim on whole batches: nothing of the engine, no micro-batches.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import LossScale, Optimizer, Pin
from flowrun.models.convnet import ConvNet
from flowrun.models.gpt import GPT
from flowrun.models.losses import cross_entropy
from flowrun.models.metrics import accuracy
from flowrun.models.mlp import MLP

Batch = Mapping[str, Tensor]
Measure = Callable[[Tensor, Batch], Tensor]
Hook = Callable[[nn.Module, int], object]

STEPS = 10


@dataclass(frozen=True, eq=False)
class Training:
    """What is trained, apart from where.  Compared and hashed by identity.

    model: makes it, the same at every call.  inputs: model argument -> batch field.  batches: one a
    step, whole.  pins: of the axis `tensor`.  autocast, loss_scale: not of plain_loop, which is
    fp32.
    """

    model: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    loss: Measure
    batches: tuple[Batch, ...]
    optimizer: Optimizer
    micro_batches: int
    pins: tuple[Pin, ...] = ()
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    narrow_residual: bool = False
    loss_scale: LossScale | None = None

    @property
    def micro_batch(self) -> int:
        return len(next(iter(self.batches[0].values()))) // self.micro_batches

    def rows(self, step: int, micro_batch: int, rows: slice) -> Batch:
        """Rows of a micro-batch: what the engine's readers ask for (runtime.rank.Batches)."""
        start = micro_batch * self.micro_batch
        part = slice(start + rows.start, start + rows.stop)
        return {name: value[part] for name, value in self.batches[step].items()}

    def output_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        output = model(**{argument: batch[name] for argument, name in self.inputs.items()})
        return output, self.loss(output, batch)


@dataclass(frozen=True)
class Trained:
    """losses: of each step.  before, after: logical weights by name."""

    losses: tuple[float, ...]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@lru_cache(maxsize=32)
def plain_loop(training: Training, clip_norm: float = 0.0, steps: int = STEPS) -> Trained:
    """Train on one device, whole batch by whole batch."""
    model = training.model().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch_optimizer(training.optimizer, model)
    losses = []
    for batch in training.batches[:steps]:
        optimizer.zero_grad()
        _, loss = training.output_loss(model, batch)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return Trained(tuple(losses), before, {n: p.detach() for n, p in model.named_parameters()})


@lru_cache(maxsize=32)
def micro_batch_loop(
    training: Training, steps: int, before: Hook | None = None, after: Hook | None = None
) -> tuple[list[float], Mapping[str, Tensor]]:
    """(losses, parameters and buffers after) on one device, gradients accumulated over
    micro-batches: what counts where a buffer changes with each.  Under torch.autocast, if the
    training is.

    before, after: called around each micro-batch with the model and its number in the run.
    """
    model = training.model().train()
    optimizer = torch_optimizer(training.optimizer, model)
    narrow = {"dtype": training.autocast, "enabled": training.autocast is not None}
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for k in range(training.micro_batches):
            if before:
                before(model, step * training.micro_batches + k)
            batch = training.rows(step, k, slice(0, training.micro_batch))
            with torch.autocast("cpu", **narrow):
                loss = training.output_loss(model, batch)[1]
            (loss / training.micro_batches).backward()  # type: ignore[no-untyped-call]
            if after:
                after(model, step * training.micro_batches + k)
            total += loss.item() / training.micro_batches
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


@torch.no_grad()
def plain_evaluation(
    training: Training, weights: Mapping[str, Tensor], steps: int
) -> list[dict[str, float]]:
    """Loss and metrics of each of the first batches, in eval mode."""
    model = training.model().eval()
    model.load_state_dict(dict(weights), strict=True)
    out = []
    for batch in training.batches[:steps]:
        output, loss = training.output_loss(model, batch)
        measured = {name: metric(output, batch) for name, metric in training.metrics.items()}
        out.append({name: value.item() for name, value in {"loss": loss, **measured}.items()})
    return out


def loss_difference(found: Sequence[float], plain: Trained) -> float:
    """Largest relative difference of a step's loss."""
    pairs = zip(found, plain.losses, strict=True)
    return largest(abs(one - other) / abs(other) for one, other in pairs)


def weight_difference(found: Mapping[str, Tensor], plain: Trained) -> float:
    """Largest difference of a weight, as a share of the way that training moved it (2-norms)."""
    assert set(found) == set(plain.after)
    return largest(
        float((found[name] - after).norm() / (after - plain.before[name]).norm())
        for name, after in plain.after.items()
    )


def largest(differences: Iterable[float]) -> float:
    """Infinite if one is no number, which max() leaves out."""
    found = list(differences)
    return max(found) if all(map(math.isfinite, found)) else math.inf


def torch_optimizer(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    settings = dict(optimizer.arguments)
    if optimizer.name != "adamw":
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer.name]
        return kind(model.parameters(), **settings)  # type: ignore[arg-type]
    betas = (settings.pop("beta1"), settings.pop("beta2"))
    return torch.optim.AdamW(model.parameters(), betas=betas, **settings)  # type: ignore[arg-type]


# ---- what is trained -----------------------------------------------------------------------------

VOCABULARY, CONTEXT, WIDTH, BLOCKS = 64, 16, 32, 4


def sgd(
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    numbers = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return Optimizer("sgd", (("lr", lr), *numbers.items()))


ADAMW = Optimizer(
    "adamw", (("lr", 3e-3), ("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-8), ("weight_decay", 0.1))
)
MOMENTUM = sgd(0.1, 0.9, 1e-3, nesterov=True)


def pins(dims: Mapping[str, int]) -> tuple[Pin, ...]:
    """Weights split on the axis tensor: pattern -> dim."""
    return tuple(Pin(pattern, "variable", "tensor", S(dim)) for pattern, dim in dims.items())


MEGATRON = pins(
    {
        "embed.wte.weight": 0,
        "blocks.*.attn.qkv.weight": 0,
        "blocks.*.attn.proj.weight": 1,
        "blocks.*.mlp.fc1.weight": 0,
        "blocks.*.mlp.fc2.weight": 1,
        "head.weight": 0,
    }
)
COLUMNS_THEN_ROWS = pins({"hidden.*": 0, "output.weight": 1})
CLASSES = pins({"output.*": 0})
CHANNELS = pins({"conv1.*": 0, "conv2.weight": 1})


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with weights of its own seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def token_batches(
    count: int, samples: int, ids: int = VOCABULARY, length: int = CONTEXT
) -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(1)
    size = (samples, length + 1)
    windows = [torch.randint(0, ids, size, generator=generator) for _ in range(count)]
    return tuple(
        {"tokens": w[:, :-1].contiguous(), "targets": w[:, 1:].contiguous()} for w in windows
    )


def image_batches(count: int, samples: int, classes: int) -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(
        {
            "images": torch.rand(samples, 64, generator=generator),
            "labels": torch.randint(0, classes, (samples,), generator=generator),
        }
        for _ in range(count)
    )


def gpt(
    blocks: int = BLOCKS, width: int = WIDTH, samples: int = 16, micro_batches: int = 4
) -> Training:
    """A tiny GPT with Megatron's pins, trained by AdamW."""
    return Training(
        partial(seeded, partial(GPT, VOCABULARY, CONTEXT, blocks, 4, width)),
        {"tokens_BT": "tokens"},
        cross_entropy,
        token_batches(STEPS, samples),
        ADAMW,
        micro_batches,
        MEGATRON,
        {"accuracy": accuracy},
    )


def classifier(
    make: Callable[[], nn.Module], argument: str, pinned: tuple[Pin, ...], micro_batches: int = 4
) -> Training:
    """An image classifier of 10 classes, trained by SGD with momentum on 16 images a step."""
    return Training(
        partial(seeded, make),
        {argument: "images"},
        partial(cross_entropy, target="labels"),
        image_batches(STEPS, 16, 10),
        MOMENTUM,
        micro_batches,
        pinned,
        {"accuracy": partial(accuracy, target="labels")},
    )


def mlp(
    hidden: int = 12, pinned: tuple[Pin, ...] = COLUMNS_THEN_ROWS, micro_batches: int = 4
) -> Training:
    """The seed programs' model, narrow."""
    return classifier(partial(MLP, 64, hidden, 10), "x_BI", pinned, micro_batches)


def convnet() -> Training:
    """Two convolutions, a pool and a linear layer."""
    return classifier(partial(ConvNet, 8, 4, 10), "images_BP", CHANNELS)


TINY_GPT = gpt()
TINY_MLP = mlp()
TINY_CONVNET = convnet()
