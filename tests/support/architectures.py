"""Architectures of `transformers`, tiny: each as its authors wrote it, with random weights and no
dropout; and those of the paper (paper_models.py).  Each is called with labels and gives its own
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from support.architecture import MICRO_BATCHES, Architecture
from support.paper_models import PAPER_MODELS
from support.plain_loop import Batch, Training

VOCABULARY, LENGTH, WIDTH, HEADS, CLASSES = 32, 6, 16, 4, 8


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

_VIT = {
    "*.q_proj.*": 0,
    "*.k_proj.*": 0,
    "*.v_proj.*": 0,
    "*.o_proj.weight": 1,
    "*.fc1.*": 0,
    "*.fc2.weight": 1,
}


def published(
    name: str,
    config: str,
    arguments: Callable[[int], dict[str, Any]],
    batch: Callable[[torch.Generator, int], Batch],
    split: Mapping[str, int],
    micro_batches: int = MICRO_BATCHES,
) -> Architecture:
    """A class of transformers; its configuration class, and that one's arguments for a number of
    layers.
    """

    def make(layers: int) -> nn.Module:
        import transformers

        configuration = getattr(transformers, config)(**arguments(layers))
        model: nn.Module = getattr(transformers, name)(configuration)
        return model

    return Architecture(name, make, batch, split, micro_batches=micro_batches)


TRANSFORMERS: Mapping[str, Architecture] = {
    "gpt2": published(
        "GPT2LMHeadModel",
        "GPT2Config",
        _gpt2,
        tokens,
        {"*.mlp.c_fc.weight": 1, "*.mlp.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
    ),
    "llama": published("LlamaForCausalLM", "LlamaConfig", _decoder, padded_tokens, _LLAMA),
    "qwen2": published("Qwen2ForCausalLM", "Qwen2Config", _decoder, tokens, _LLAMA),
    "mistral": published("MistralForCausalLM", "MistralConfig", _decoder, tokens, _LLAMA),
    "gemma": published(
        "GemmaForCausalLM", "GemmaConfig", partial(_decoder, head_dim=4), tokens, _LLAMA
    ),
    "neox": published(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _neox,
        tokens,
        {"*.dense_h_to_4h.*": 0, "*.dense_4h_to_h.weight": 1},
    ),
    "opt": published("OPTForCausalLM", "OPTConfig", _opt, padded_tokens, _OPT),
    "mixtral": published("MixtralForCausalLM", "MixtralConfig", _mixtral, tokens, _LLAMA_EXPERTS),
    "qwen2_moe": published(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _qwen_moe, tokens, _LLAMA_EXPERTS
    ),
    "bert": published("BertForMaskedLM", "BertConfig", _encoder, masked_tokens, _BERT),
    "roberta": published(
        "RobertaForMaskedLM",
        "RobertaConfig",
        partial(_encoder, pad_token_id=1),
        masked_tokens,
        _BERT,
    ),
    "distilbert": published(
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
    "t5": published(
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
    "bart": published("BartForConditionalGeneration", "BartConfig", _bart, pairs, _OPT),
    "vit": published("ViTForImageClassification", "ViTConfig", _vit, images, _VIT),
    "convnext": published(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _convnext,
        images,
        {"*.pwconv1.*": 0, "*.pwconv2.weight": 1},
    ),
    "resnet": published(
        "ResNetForImageClassification",
        "ResNetConfig",
        _resnet,
        images,
        {"classifier.1.*": 0},
        micro_batches=1,
    ),
}

ARCHITECTURES: Mapping[str, Architecture] = {**PAPER_MODELS, **TRANSFORMERS}


@cache
def training(name: str, layers: int = 1) -> Training:
    """Of an architecture, with Megatron's pins, once."""
    return ARCHITECTURES[name].training(layers)


@cache
def unpinned(name: str, layers: int = 1) -> Training:
    """The same, with nothing pinned, once."""
    return replace(training(name, layers), pins=())
