"""The models of OneFlow's paper that flowrun ships, tiny, without dropout."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT
from flowrun.models.insightface import InsightFace
from flowrun.models.losses import binary_cross_entropy, cross_entropy, margin_softmax
from flowrun.models.resnet import ResNet
from flowrun.models.wide_deep import WideDeep
from support.layouts.plain_loop import Batch, sgd
from support.nets.architecture import Architecture

VOCABULARY, LENGTH, WIDTH, CLASSES, IDS = 32, 6, 16, 12, 600


def _pictures(generator: torch.Generator, samples: int) -> Batch:
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    return {"images": images, "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def _tokens(generator: torch.Generator, samples: int) -> Batch:
    window = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return {"tokens": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


def _masked(generator: torch.Generator, samples: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    order = torch.rand(samples, LENGTH, generator=generator).argsort(1)
    return {
        "tokens": tokens,
        "segments": (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(samples, 1),
        "positions": order[:, :2].contiguous(),
        "targets": torch.randint(0, VOCABULARY, (samples, 2), generator=generator),
    }


def clicks(generator: torch.Generator, samples: int, rows: int) -> Batch:
    """Ids that come again and again, within a sample too."""
    return {
        "ids": torch.randint(0, 9, (samples, 3), generator=generator) ** 2 % rows,
        "numbers": torch.randn(samples, 2, generator=generator),
        "clicks": torch.randint(0, 2, (samples,), generator=generator).float(),
    }


_BLOCKS = {
    **{"blocks.*.attn.qkv.*": 0, "blocks.*.attn.proj.weight": 1},
    **{"blocks.*.mlp.fc1.*": 0, "blocks.*.mlp.fc2.weight": 1},
}


_GPT2 = Architecture(
    "GPT-2",
    lambda layers: GPT(VOCABULARY, LENGTH, layers, 2, WIDTH, bias=True, tied=True),
    _tokens,
    {"embed.wte.weight": 0, **_BLOCKS},
    {"tokens_BT": "tokens"},
    cross_entropy,
)

PAPER_MODELS: Mapping[str, Architecture] = {
    "paper_resnet": Architecture(
        "ResNet v1.5",
        lambda layers: ResNet([1] * layers, 4, CLASSES, small_images=True),
        _pictures,
        {"head.*": 0},
        {"images_BCHW": "images"},
        partial(cross_entropy, target="labels"),
        micro_batches=1,
    ),
    "paper_bert": Architecture(
        "BERT",
        lambda layers: BERT(VOCABULARY, LENGTH, layers, 2, WIDTH, dropout=0.0),
        _masked,
        _BLOCKS,
        {"tokens_BT": "tokens", "segments_BT": "segments", "positions_BK": "positions"},
        cross_entropy,
    ),
    "insightface": Architecture(
        "InsightFace",
        lambda layers: InsightFace([1] * layers, 4, 8, 8, CLASSES, scale=8.0, angle=0.2),
        _pictures,
        {"head.weight": 0},
        {"images_BCHW": "images", "labels_B": "labels"},
        margin_softmax,
        micro_batches=1,
    ),
    "wide_deep": Architecture(
        "Wide & Deep",
        lambda layers: WideDeep(IDS, 3, 2, 4, [8] * layers),
        partial(clicks, rows=IDS),
        {"wide.weight": 0, "deep.weight": 0},
        {"ids_BF": "ids", "numbers_BN": "numbers"},
        partial(binary_cross_entropy, target="clicks"),
        sgd(0.5),  # without momentum and decay tables are updated by rows
    ),
    "paper_gpt2": _GPT2,
    "paper_gpt2_zero": replace(_GPT2, name="GPT-2, each with ZeRO 3 on data 2", zero=3),
}
