"""flowrun's own models and what computes the same in transformers, one function a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from flowrun.launcher.model.hugging_face.counterpart import (
    AFTER_TWO_ROWS,
    PLAIN,
    QKV_BY_HEAD,
    QKV_IN_COLUMNS,
    TRANSPOSED,
    Counterpart,
    LayerNames,
    WeightLayout,
)
from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT, Attention
from flowrun.models.llama import Llama


def _gpt(model: GPT) -> Counterpart:
    """GPT-2; without biases it is what OPT computes with enable_bias=False."""
    return _gpt2(model) if model.blocks[0].mlp.fc1.bias is not None else _opt(model)  # type: ignore[union-attr]


def _gpt2(model: GPT) -> Counterpart:
    attention: Any = model.blocks[0].attn
    block = "transformer.h.{}"
    return Counterpart(
        name="GPT2LMHeadModel",
        kind="gpt2",
        config={
            "vocab_size": model.embed.wte.num_embeddings,
            "n_positions": model.embed.wpe.num_embeddings,
            "n_embd": model.norm.weight.numel(),
            "n_layer": len(model.blocks),
            "n_head": attention.heads,
            "activation_function": "gelu",
            "tie_word_embeddings": model.head.weight is model.embed.wte.weight,
        },
        also={key: attention.share for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
        compared=(
            "n_head",
            "activation_function",
            "layer_norm_epsilon",
            "tie_word_embeddings",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
        ),
        rows=(
            LayerNames("embed.wte", "transformer.wte"),
            LayerNames("embed.wpe", "transformer.wpe"),
            LayerNames("blocks.{}.ln1", f"{block}.ln_1"),
            _name_qkv(attention, f"{block}.attn.c_attn", QKV_IN_COLUMNS),
            LayerNames("blocks.{}.attn.proj", f"{block}.attn.c_proj", PLAIN, TRANSPOSED),
            LayerNames("blocks.{}.ln2", f"{block}.ln_2"),
            LayerNames("blocks.{}.mlp.fc1", f"{block}.mlp.c_fc", PLAIN, TRANSPOSED),
            LayerNames("blocks.{}.mlp.fc2", f"{block}.mlp.c_proj", PLAIN, TRANSPOSED),
            LayerNames("norm", "transformer.ln_f"),
            LayerNames("head", "lm_head"),
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


def _opt(model: GPT) -> Counterpart:
    attention: Any = model.blocks[0].attn
    width = model.norm.weight.numel()
    block = "model.decoder.layers.{}"
    theirs = " ".join(f"{block}.self_attn.{name}_proj" for name in "qkv")
    return Counterpart(
        name="OPTForCausalLM",
        kind="opt",
        config={
            "vocab_size": model.embed.wte.num_embeddings,
            "max_position_embeddings": model.embed.wpe.num_embeddings,
            "hidden_size": width,
            "word_embed_proj_dim": width,
            "ffn_dim": 4 * width,
            "num_hidden_layers": len(model.blocks),
            "num_attention_heads": attention.heads,
            "activation_function": "gelu",
            "enable_bias": False,
            "tie_word_embeddings": model.head.weight is model.embed.wte.weight,
        },
        also={"dropout": attention.share, "attention_dropout": attention.share},
        compared=(
            "num_attention_heads",
            "activation_function",
            "do_layer_norm_before",
            "tie_word_embeddings",
        ),
        rows=(
            LayerNames("embed.wte", "model.decoder.embed_tokens"),
            LayerNames("embed.wpe", "model.decoder.embed_positions", PLAIN, AFTER_TWO_ROWS),
            LayerNames("blocks.{}.ln1", f"{block}.self_attn_layer_norm"),
            _name_qkv(attention, theirs),
            LayerNames("blocks.{}.attn.proj", f"{block}.self_attn.out_proj"),
            LayerNames("blocks.{}.ln2", f"{block}.final_layer_norm"),
            LayerNames("blocks.{}.mlp.fc1", f"{block}.fc1"),
            LayerNames("blocks.{}.mlp.fc2", f"{block}.fc2"),
            LayerNames("norm", "model.decoder.final_layer_norm"),
            LayerNames("head", "lm_head"),
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


def _name_qkv(attention: Attention, theirs: str, layout: WeightLayout = PLAIN) -> LayerNames:
    if attention.separate_qkv:
        ours = " ".join(f"blocks.{{}}.attn.{name}" for name in "qkv")
        return LayerNames(ours, theirs, their_layout=layout)
    return LayerNames("blocks.{}.attn.qkv", theirs, QKV_BY_HEAD, layout)


def _llama(model: Llama) -> Counterpart:
    block: Any = model.blocks[0]
    attention, mlp, theirs = block.attn, block.mlp, "model.layers.{}"
    return Counterpart(
        name="LlamaForCausalLM",
        kind="llama",
        config={
            "vocab_size": model.embed.num_embeddings,
            "hidden_size": model.norm.weight.numel(),
            "intermediate_size": mlp.gate.out_features,
            "num_hidden_layers": len(model.blocks),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "head_dim": attention.C,
            "rms_norm_eps": model.norm.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": attention.base},
            "tie_word_embeddings": False,
        },
        compared=(
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_parameters",
            "hidden_act",
            "tie_word_embeddings",
        ),
        rows=(
            LayerNames("embed", "model.embed_tokens"),
            LayerNames("blocks.{}.norm1", f"{theirs}.input_layernorm"),
            *(
                LayerNames(f"blocks.{{}}.attn.{name}", f"{theirs}.self_attn.{name}_proj")
                for name in "qkv"
            ),
            LayerNames("blocks.{}.attn.proj", f"{theirs}.self_attn.o_proj"),
            LayerNames("blocks.{}.norm2", f"{theirs}.post_attention_layernorm"),
            *(
                LayerNames(f"blocks.{{}}.mlp.{name}", f"{theirs}.mlp.{name}_proj")
                for name in ("gate", "up", "down")
            ),
            LayerNames("norm", "model.norm"),
            LayerNames("head", "lm_head"),
        ),
        depth=len(model.blocks),
    )


def _bert(model: BERT) -> Counterpart:
    attention: Any = model.blocks[0].attn
    block, head = "bert.encoder.layer.{}", "cls.predictions"
    qkv = " ".join(f"{block}.attention.self.{name}" for name in ("query", "key", "value"))
    width = model.embed.norm.weight.numel()
    return Counterpart(
        name="BertForMaskedLM",
        kind="bert",
        config={
            "vocab_size": model.embed.token.num_embeddings,
            "max_position_embeddings": model.embed.position.num_embeddings,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": len(model.blocks),
            "num_attention_heads": attention.heads,
            "tie_word_embeddings": model.head.out.weight is model.embed.token.weight,
        },
        also={
            "hidden_dropout_prob": attention.share,
            "attention_probs_dropout_prob": attention.share,
        },
        compared=(
            "num_attention_heads",
            "hidden_act",
            "layer_norm_eps",
            "is_decoder",
            "tie_word_embeddings",
        ),
        rows=(
            LayerNames("embed.token", "bert.embeddings.word_embeddings"),
            LayerNames("embed.position", "bert.embeddings.position_embeddings"),
            LayerNames("embed.segment", "bert.embeddings.token_type_embeddings"),
            LayerNames("embed.norm", "bert.embeddings.LayerNorm"),
            LayerNames("blocks.{}.attn.qkv", qkv, QKV_BY_HEAD),
            LayerNames("blocks.{}.attn.proj", f"{block}.attention.output.dense"),
            LayerNames("blocks.{}.ln1", f"{block}.attention.output.LayerNorm"),
            LayerNames("blocks.{}.mlp.fc1", f"{block}.intermediate.dense"),
            LayerNames("blocks.{}.mlp.fc2", f"{block}.output.dense"),
            LayerNames("blocks.{}.ln2", f"{block}.output.LayerNorm"),
            LayerNames("head.dense", f"{head}.transform.dense"),
            LayerNames("head.norm", f"{head}.transform.LayerNorm"),
            LayerNames("head.out", f"{head}.decoder"),
            LayerNames("head.out.bias", f"{head}.bias"),  # transformers names this bias twice
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


COUNTERPARTS: Mapping[type, Callable[[Any], Counterpart]] = {GPT: _gpt, Llama: _llama, BERT: _bert}


def find_counterpart(model: nn.Module) -> Counterpart | None:
    """Return the class of transformers that computes what a model does, if one does."""
    found = COUNTERPARTS.get(type(model))
    return found(model) if found else None
