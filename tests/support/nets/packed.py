"""The same documents twice: packed into samples, and each alone in a padded one."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from flowrun.engine.strategy import Pin
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from flowrun.models.losses import cross_entropy
from support.layouts.plain_loop import (
    ADAMW,
    MEGATRON,
    STEPS,
    VOCABULARY,
    Batch,
    Training,
    pins,
    seeded,
)

LENGTH, EACH, SAMPLES = 24, 3, 8  # tokens of a sample, documents in it, samples of a step
ROWS_AND_COLUMNS = pins(
    {
        "blocks.*.attn.[qkv].weight": 0,
        "blocks.*.attn.proj.weight": 1,
        "blocks.*.mlp.gate.weight": 0,
        "blocks.*.mlp.up.weight": 0,
        "blocks.*.mlp.down.weight": 1,
    }
)


def draw_documents(draws: torch.Generator) -> list[Tensor]:
    """Draw the ids of EACH documents, which have LENGTH tokens and one target less each."""
    first, second = torch.randint(2, LENGTH // 3, (2,), generator=draws).tolist()
    sizes = (first, second, LENGTH - first - second)
    return [torch.randint(0, VOCABULARY, (size,), generator=draws) for size in sizes]


def target_of(ids: Tensor) -> Tensor:
    """Return the next id of each, and -100 behind the last."""
    return torch.cat([ids[1:], torch.tensor([-100])])


def padded(samples: list[list[Tensor]]) -> Batch:
    """Make a batch with a document a sample."""
    alone = [ids for documents in samples for ids in documents]
    fill = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    long = [torch.zeros(LENGTH, dtype=torch.int64)]  # of the length that all get
    targets = [target_of(ids) for ids in alone]
    return {
        "tokens": fill([*alone, *long])[:-1],
        "targets": fill([*targets, *long], padding_value=-100)[:-1],
    }


def packed(samples: list[list[Tensor]]) -> Batch:
    """Make a batch with EACH documents a sample."""
    return {
        "tokens": torch.stack([torch.cat(each) for each in samples]),
        "targets": torch.stack([torch.cat([*map(target_of, each)]) for each in samples]),
        "positions": torch.stack(
            [torch.cat([torch.arange(len(ids)) for ids in each]) for each in samples]
        ),
        "documents": torch.tensor([[len(ids) for ids in each] for each in samples]),
    }


def trainings(make: Callable[[], nn.Module], pinned: tuple[Pin, ...]) -> tuple[Training, Training]:
    """Return the packed and the padded training of one model."""
    draws = torch.Generator().manual_seed(3)
    steps = [[draw_documents(draws) for _ in range(SAMPLES)] for _ in range(STEPS)]
    tokens = {"tokens_BT": "tokens"}
    more = {name: name for name in ("positions", "documents")}
    model = partial(seeded, make)
    one = Training(
        model, {**tokens, **more}, cross_entropy, (*map(packed, steps),), ADAMW, 2, pinned
    )
    other = Training(model, tokens, cross_entropy, (*map(padded, steps),), ADAMW, 2, pinned)
    return one, other


GPT_PACKED, GPT_PADDED = trainings(partial(GPT, VOCABULARY, LENGTH, 2, 4, 32), MEGATRON)
LLAMA_PACKED, LLAMA_PADDED = trainings(
    partial(Llama, VOCABULARY, 2, 4, 2, 32, 48), ROWS_AND_COLUMNS
)
