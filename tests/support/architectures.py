"""Architectures of `transformers`, tiny: each as its authors wrote it, with random weights and no
dropout.

Every one is called with labels and gives its own loss.  All samples of a batch have as many labels,
so that the mean over a batch is the mean of its micro-batches' means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.strategy import Optimizer
from support.layouts import Layout
from support.plain_loop import Batch, Trained, Training, pins, seeded

VOCABULARY, LENGTH, WIDTH, HEADS, CLASSES = 32, 6, 16, 4, 8
LOSS_TOLERANCE = 1e-5
STEPS, SAMPLES, MICRO_BATCHES = 5, 8, 2
SGD = Optimizer(
    "sgd", (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 1e-3), ("nesterov", False))
)

PINNED = "tensor 2, pinned"
LAYOUTS = {
    "data 2": Layout(data=2),
    "tensor 2": Layout(tensor=2),
    PINNED: Layout(tensor=2),
    "stages 2": Layout(stages=2),
    "data 2 x stages 2, ZeRO 2": Layout(data=2, stages=2, zero=2),
}


@dataclass(frozen=True)
class Architecture:
    """What is built and what it is fed.

    name: the class of transformers.  config: its configuration class, and its arguments, for a
    number of layers.  batch: argument -> tensor, from a generator and a number of samples.
    split: weight pattern -> dim: Megatron's layout on the axis tensor.  micro_batches: 1 where
    batch norm takes statistics of each.
    """

    name: str
    config: str
    arguments: Callable[[int], dict[str, Any]]
    batch: Callable[[torch.Generator, int], Batch]
    split: Mapping[str, int]
    micro_batches: int = MICRO_BATCHES

    def make(self, layers: int) -> nn.Module:
        """The model, the same at every call."""
        import transformers

        config = getattr(transformers, self.config)(**self.arguments(layers))
        model: nn.Module = seeded(partial(getattr(transformers, self.name), config))
        return model.train()

    def training(self, layers: int = 1) -> Training:
        """Five steps of SGD in two micro-batches: AdamW would hide a gradient of wrong length."""
        generator = torch.Generator().manual_seed(3)
        batches = tuple(self.batch(generator, SAMPLES) for _ in range(STEPS))
        return Training(
            partial(self.make, layers),
            {name: name for name in batches[0]},
            own_loss,
            batches,
            SGD,
            self.micro_batches,
            pins(self.split),
        )


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that the model took from its labels."""
    loss: Tensor = output.loss
    return loss


def weights_apart(found: Mapping[str, Tensor], plain: Trained) -> float:
    """Largest difference of a weight, as a share of the way that training moved it.

    Some never move, such as the bias of keys, to which softmax is blind: none counts as having
    moved less than a thousandth of the way of all together.
    """
    moved = {name: float((w - plain.before[name]).norm()) for name, w in plain.after.items()}
    least = 1e-3 * math.sqrt(sum(way * way for way in moved.values()))
    return max(float((found[n] - plain.after[n]).norm()) / max(w, least) for n, w in moved.items())


# ---- what they are fed ---------------------------------------------------------------------------


def _ids(generator: torch.Generator, samples: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)


def tokens(generator: torch.Generator, samples: int) -> Batch:
    """A language model's: every token is the label of the one before."""
    ids = _ids(generator, samples)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_tokens(generator: torch.Generator, samples: int) -> Batch:
    """The same, with a mask that hides the last two tokens."""
    batch = dict(tokens(generator, samples))
    seen = torch.ones_like(batch["input_ids"])
    seen[:, -2:] = 0
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": seen,
        "labels": batch["labels"].masked_fill(seen == 0, -100),
    }


def masked_tokens(generator: torch.Generator, samples: int) -> Batch:
    """A masked language model's: two tokens of a sample are to be guessed; the last is padding."""
    ids = _ids(generator, samples)
    order = torch.rand(samples, LENGTH - 1, generator=generator).argsort(1)
    guessed = torch.zeros(samples, LENGTH, dtype=torch.bool).scatter_(1, order[:, :2], True)
    seen = torch.ones_like(ids)
    seen[:, -1] = 0
    labels = ids.masked_fill(~guessed, -100)
    return {
        "input_ids": ids.masked_fill(guessed, 3),
        "attention_mask": seen,
        "labels": labels,
    }


def pairs(generator: torch.Generator, samples: int) -> Batch:
    """A sequence and what it is to be turned into."""
    seen = torch.ones(samples, LENGTH, dtype=torch.int64)
    seen[:, -1] = 0
    return {
        "input_ids": _ids(generator, samples),
        "attention_mask": seen,
        "labels": _ids(generator, samples, LENGTH - 2),
    }


def images(generator: torch.Generator, samples: int) -> Batch:
    """Images of 16 x 16 pixels in three colours, and their classes."""
    return {
        "pixel_values": torch.randn(samples, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


# ---- configurations ------------------------------------------------------------------------------


def _gpt2(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_layer": layers,
        "n_head": HEADS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _decoder(layers: int, **more: Any) -> dict[str, Any]:
    """Of the Llama family: rotary positions, grouped queries, gated MLP."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "attention_dropout": 0.0,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _encoder(layers: int, **more: Any) -> dict[str, Any]:
    """Of the BERT family."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }


def _distilbert(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "hidden_dim": 24,
        "n_layers": layers,
        "n_heads": HEADS,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _vit(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": CLASSES,
        **more,
    }


def _convnext(layers: int) -> dict[str, Any]:
    return {
        "patch_size": 2,
        "num_stages": 2,
        "hidden_sizes": [8, 16],
        "depths": [layers, 1],
        "num_labels": CLASSES,
    }


def _resnet(layers: int) -> dict[str, Any]:
    return {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [layers, 1],
        "layer_type": "basic",
        "num_labels": CLASSES,
    }


def _t5(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": layers,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }


def _bart(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "use_cache": False,
    }


def _opt(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "ffn_dim": 24,
        "word_embed_proj_dim": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "use_cache": False,
    }


def _neox(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cache": False,
    }


def _mixtral(layers: int) -> dict[str, Any]:
    return _decoder(layers, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def _qwen_moe(layers: int) -> dict[str, Any]:
    return _decoder(
        layers,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
    )


# ---- Megatron's layouts --------------------------------------------------------------------------

_LLAMA = {
    "*.q_proj.weight": 0,
    "*.k_proj.weight": 0,
    "*.v_proj.weight": 0,
    "*.o_proj.weight": 1,
    "*.gate_proj.weight": 0,
    "*.up_proj.weight": 0,
    "*.down_proj.weight": 1,
}
_LLAMA_EXPERTS = {k: d for k, d in _LLAMA.items() if "_proj" in k and k[2] in "qkvo"}
_BERT = {
    "*.self.query.*": 0,
    "*.self.key.*": 0,
    "*.self.value.*": 0,
    "*.attention.output.dense.weight": 1,
    "*.intermediate.dense.*": 0,
    "*.layer.*.output.dense.weight": 1,
}
_OPT = {
    "*.q_proj.*": 0,
    "*.k_proj.*": 0,
    "*.v_proj.*": 0,
    "*.out_proj.weight": 1,
    "*.fc1.*": 0,
    "*.fc2.weight": 1,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        _gpt2,
        tokens,
        {"*.mlp.c_fc.weight": 1, "*.mlp.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _decoder, padded_tokens, _LLAMA),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _decoder, tokens, _LLAMA),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", _decoder, tokens, _LLAMA),
    "gemma": Architecture(
        "GemmaForCausalLM", "GemmaConfig", partial(_decoder, head_dim=4), tokens, _LLAMA
    ),
    "neox": Architecture(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _neox,
        tokens,
        {"*.dense_h_to_4h.*": 0, "*.dense_4h_to_h.weight": 1},
    ),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", _opt, padded_tokens, _OPT),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", _mixtral, tokens, _LLAMA_EXPERTS
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _qwen_moe, tokens, _LLAMA_EXPERTS
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", _encoder, masked_tokens, _BERT),
    "roberta": Architecture(
        "RobertaForMaskedLM",
        "RobertaConfig",
        partial(_encoder, pad_token_id=1),
        masked_tokens,
        _BERT,
    ),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _distilbert,
        masked_tokens,
        {
            "*.q_lin.*": 0,
            "*.k_lin.*": 0,
            "*.v_lin.*": 0,
            "*.out_lin.weight": 1,
            "*.lin1.*": 0,
            "*.lin2.weight": 1,
        },
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        _t5,
        pairs,
        {
            "*.q.weight": 0,
            "*.k.weight": 0,
            "*.v.weight": 0,
            "*.o.weight": 1,
            "*.wi.weight": 0,
            "*.wo.weight": 1,
        },
    ),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", _bart, pairs, _OPT),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", _vit, images, _BERT),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _convnext,
        images,
        {"*.pwconv1.*": 0, "*.pwconv2.weight": 1},
    ),
    "resnet": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        _resnet,
        images,
        {"classifier.1.*": 0},
        micro_batches=1,
    ),
}


@cache
def training(name: str, layers: int = 1) -> Training:
    """Of an architecture, with Megatron's pins, once."""
    return ARCHITECTURES[name].training(layers)


@cache
def unpinned(name: str, layers: int = 1) -> Training:
    """The same, with nothing pinned, once."""
    return replace(training(name, layers), pins=())
