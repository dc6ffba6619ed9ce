"""Architectures of `transformers`, tiny: each as its authors wrote it, with random weights and no
dropout.  Each is called with labels and gives its own loss, unless a loss is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.layouts.plain_loop import Batch, Measure
from support.nets.architecture import MICRO_BATCHES, Architecture, own_loss
from support.nets.vision import make_importable

VOCABULARY, LENGTH, WIDTH, HEADS, CLASSES = 32, 6, 16, 4, 8
SIDE = 16  # of an image, in pixels
IMAGE = VOCABULARY - 1  # the token that stands for a patch

Arguments = Callable[[int], dict[str, Any]]  # of a configuration, for a number of layers


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


def unmasked_tokens(generator: torch.Generator, samples: int) -> Batch:
    """The same for a model that takes no mask."""
    batch = masked_tokens(generator, samples)
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def pairs(generator: torch.Generator, samples: int) -> Batch:
    """A sequence and what it is to be turned into."""
    seen = torch.ones(samples, LENGTH, dtype=torch.int64)
    seen[:, -1] = 0
    return {
        "input_ids": _ids(generator, samples),
        "attention_mask": seen,
        "labels": _ids(generator, samples, LENGTH - 2),
    }


def _classes(generator: torch.Generator, samples: int) -> Tensor:
    return torch.randint(0, CLASSES, (samples,), generator=generator)


def images(generator: torch.Generator, samples: int, side: int = SIDE) -> Batch:
    """Square images in three colours, and their classes."""
    return {
        "pixel_values": torch.randn(samples, 3, side, side, generator=generator),
        "labels": _classes(generator, samples),
    }


def segmented(generator: torch.Generator, samples: int) -> Batch:
    """Images and the class of every pixel; some count for nothing."""
    batch = dict(images(generator, samples, 2 * SIDE))
    labels = torch.randint(0, CLASSES, (samples, 2 * SIDE, 2 * SIDE), generator=generator)
    labels[:, :2] = 255
    return {**batch, "labels": labels}


def sounds(generator: torch.Generator, samples: int) -> Batch:
    """Waves and their classes."""
    return {
        "input_values": torch.randn(samples, 240, generator=generator),
        "labels": _classes(generator, samples),
    }


def spoken(generator: torch.Generator, samples: int) -> Batch:
    """Waves and what is said in them."""
    labels = torch.randint(1, VOCABULARY, (samples, 3), generator=generator)
    return {**sounds(generator, samples), "labels": labels}


def spectra(generator: torch.Generator, samples: int) -> Batch:
    """Spectrograms of 16 times in 8 bands, and their classes."""
    return {
        "input_values": torch.randn(samples, 16, 8, generator=generator),
        "labels": _classes(generator, samples),
    }


def transcribed(generator: torch.Generator, samples: int) -> Batch:
    """Spectrograms of 8 bands at 16 times, and what is said in them."""
    return {
        "input_features": torch.randn(samples, 8, 16, generator=generator),
        "labels": _ids(generator, samples, 4),
    }


def series(generator: torch.Generator, samples: int) -> Batch:
    """The past of two quantities, and their future."""
    return {
        "past_values": torch.randn(samples, 16, 2, generator=generator),
        "future_values": torch.randn(samples, 4, 2, generator=generator),
    }


def captions(generator: torch.Generator, samples: int) -> Batch:
    """Images and what is written below each; the last token is the end."""
    ids = _ids(generator, samples)
    ids[:, -1] = 2
    pixels = images(generator, samples)["pixel_values"]
    return {"input_ids": ids, "pixel_values": pixels}


def told_images(generator: torch.Generator, samples: int) -> Batch:
    """Tokens, an image, and the tokens again as what is to be said."""
    batch = captions(generator, samples)
    return {**batch, "labels": batch["input_ids"].clone()}


def asked_images(generator: torch.Generator, samples: int) -> Batch:
    """A question, an image, and how right each answer is."""
    answers = torch.rand(samples, CLASSES, generator=generator)
    return {**captions(generator, samples), "labels": answers}


def shown_images(generator: torch.Generator, samples: int) -> Batch:
    """Tokens, the first four of which stand for the patches of an image; those have no label."""
    batch = dict(captions(generator, samples))
    ids = batch["input_ids"].clamp(max=IMAGE - 1)
    labels = ids.clone()
    labels[:, :4], ids[:, :4] = -100, IMAGE
    return {**batch, "input_ids": ids, "labels": labels}


# ---- losses of one's own -------------------------------------------------------------------------


def connected(output: Any, batch: Batch) -> Tensor:
    """Connectionist temporal classification: every moment, then what comes of it."""
    moments = output.logits.log_softmax(2).transpose(0, 1)
    samples, labels = batch["labels"].shape
    lengths = torch.full((samples,), len(moments)), torch.full((samples,), labels)
    return nn.functional.ctc_loss(moments, batch["labels"], *lengths)


def matched(output: Any, batch: Batch) -> Tensor:
    """CLIP's: every text is to know its image among those of the batch, and the other way round."""
    logits = output.logits_per_text
    wanted = torch.arange(len(logits))
    ways = [nn.functional.cross_entropy(way, wanted) for way in (logits, logits.t())]
    return (ways[0] + ways[1]) / 2


def paired(output: Any, batch: Batch) -> Tensor:
    """SigLIP's: of every text and image whether they belong together."""
    logits = output.logits_per_text
    signs = 2 * torch.eye(len(logits)) - 1
    return -nn.functional.logsigmoid(signs * logits).sum() / len(logits)


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


def _of_images(**more: Any) -> Arguments:
    """Of a configuration that says its layers itself."""
    return lambda layers: {"num_labels": CLASSES, **more}


def _wave(layers: int, **more: Any) -> dict[str, Any]:
    """Of the wav2vec 2.0 family: convolutions over the wave, then an encoder."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 8,
        "hidden_dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.0,
        "apply_spec_augment": False,
        "num_labels": CLASSES,
        **more,
    }


def _whisper(layers: int) -> dict[str, Any]:
    return {
        **_bart(layers),
        "num_mel_bins": 8,
        "max_source_positions": 8,
        "max_target_positions": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def _seen_and_read(layers: int) -> dict[str, Any]:
    """Of a model of images and text: a configuration for each."""
    text = _encoder(layers, projection_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return {
        "text_config": text,
        "vision_config": {**_vit(layers), "projection_dim": 8},
        "projection_dim": 8,
    }


def _llava(layers: int) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **_decoder(layers)},
        "vision_config": {"model_type": "clip_vision_model", **_vit(layers)},
        "image_token_index": IMAGE,
        "image_seq_length": 4,
        "vision_feature_layer": -1,
    }


def _deepseek(layers: int) -> dict[str, Any]:
    """The first layer is dense, the others have experts in two groups."""
    return _decoder(
        layers + 1,
        num_key_value_heads=HEADS,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )


def _mamba(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "state_size": 4,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _jamba(layers: int) -> dict[str, Any]:
    """State space and attention in turn; every second layer has experts."""
    return _decoder(
        2 * layers,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    )


def _patchtst(layers: int) -> dict[str, Any]:
    return {
        "num_input_channels": 2,
        "context_length": 16,
        "patch_length": 4,
        "patch_stride": 4,
        "num_hidden_layers": layers,
        "d_model": WIDTH,
        "num_attention_heads": HEADS,
        "ffn_dim": 24,
        "prediction_length": 4,
        "attention_dropout": 0.0,
        "path_dropout": 0.0,
        "ff_dropout": 0.0,
        "head_dropout": 0.0,
    }


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

_SPEECH = {
    **{k: d for k, d in _OPT.items() if "fc" not in k},
    "*.intermediate_dense.*": 0,
    "*.output_dense.weight": 1,
}
_VIT = {
    "*.q_proj.*": 0,
    "*.k_proj.*": 0,
    "*.v_proj.*": 0,
    "*.o_proj.weight": 1,
    "*.fc1.*": 0,
    "*.fc2.weight": 1,
}

OUTPUTS = {"*.weight": 0}  # where no layout is customary: every weight along its first dim


def published(
    name: str,
    config: str,
    arguments: Arguments,
    batch: Callable[[torch.Generator, int], Batch],
    split: Mapping[str, int] = OUTPUTS,
    micro_batches: int = MICRO_BATCHES,
    loss: Measure = own_loss,
) -> Architecture:
    """A class of transformers; its configuration class, and that one's arguments for a number of
    layers.
    """

    def make(layers: int) -> nn.Module:
        make_importable()
        import transformers

        configuration = getattr(transformers, config)(**arguments(layers))
        model: nn.Module = getattr(transformers, name)(configuration)
        return model

    return Architecture(name, make, batch, split, loss=loss, micro_batches=micro_batches)


def spoken_to(
    name: str,
    config: str,
    batch: Callable[[torch.Generator, int], Batch],
    loss: Measure = own_loss,
) -> Architecture:
    """A class of the wav2vec 2.0 family, fine-tuned: its convolutions stay as they are.  Where a
    loss is named, labels are for it alone: the model would look at their values.
    """
    whole = published(name, config, _wave, batch, _SPEECH, loss=loss)

    def make(layers: int) -> nn.Module:
        model: Any = whole.make(layers)
        model.freeze_feature_encoder()
        return model  # type: ignore[no-any-return]

    inputs = {} if loss is own_loss else {"input_values": "input_values"}
    return replace(whole, make=make, inputs=inputs)


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
    # ---- text ----
    "bloom": published(
        "BloomForCausalLM",
        "BloomConfig",
        lambda layers: {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "n_layer": layers,
            "n_head": HEADS,
            "use_cache": False,
        },
        tokens,
        {"*.dense_h_to_4h.*": 0, "*.dense_4h_to_h.weight": 1},
    ),
    "falcon": published(
        "FalconForCausalLM",
        "FalconConfig",
        partial(_decoder, multi_query=True),
        tokens,
        {"*.dense_h_to_4h.weight": 0, "*.dense_4h_to_h.weight": 1},
    ),
    "phi": published(
        "PhiForCausalLM",
        "PhiConfig",
        _decoder,
        tokens,
        {
            "*.q_proj.*": 0,
            "*.k_proj.*": 0,
            "*.v_proj.*": 0,
            "*.dense.weight": 1,
            "*.fc1.*": 0,
            "*.fc2.weight": 1,
        },
    ),
    "qwen3": published(
        "Qwen3ForCausalLM", "Qwen3Config", partial(_decoder, head_dim=4), tokens, _LLAMA
    ),
    "gemma2": published(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        partial(_decoder, head_dim=4, query_pre_attn_scalar=4, sliding_window=4),
        tokens,
        _LLAMA,
    ),
    "gemma3": published(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        partial(_decoder, head_dim=4, query_pre_attn_scalar=4, sliding_window=4),
        padded_tokens,
        _LLAMA,
    ),
    "electra": published(
        "ElectraForMaskedLM",
        "ElectraConfig",
        partial(_encoder, embedding_size=8),
        masked_tokens,
        _BERT,
    ),
    "albert": published(
        "AlbertForMaskedLM",
        "AlbertConfig",
        partial(_encoder, embedding_size=8, classifier_dropout_prob=0.0),
        masked_tokens,
        {
            "*.query.*": 0,
            "*.key.*": 0,
            "*.value.*": 0,
            "*.attention.dense.weight": 1,
            "*.ffn.*": 0,
            "*.ffn_output.weight": 1,
        },
    ),
    "deberta_v2": published(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        partial(
            _encoder,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
        ),
        masked_tokens,
        {"*.intermediate.dense.*": 0, "*.layer.*.output.dense.weight": 1},
    ),
    "fnet": published(
        "FNetForMaskedLM",
        "FNetConfig",
        partial(_encoder, pad_token_id=0),
        unmasked_tokens,
        {"*.intermediate.dense.*": 0, "*.layer.*.output.dense.weight": 1},
    ),
    "modernbert": published(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        partial(
            _encoder,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            local_attention=4,
            layer_types=None,
        ),
        masked_tokens,
        {"*.Wi.weight": 0, "*.Wo.weight": 1},
    ),
    "xlnet": published(
        "XLNetLMHeadModel",
        "XLNetConfig",
        lambda layers: {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "n_layer": layers,
            "n_head": HEADS,
            "d_inner": 24,
            "dropout": 0.0,
            "mem_len": None,
        },
        tokens,
        {"*.layer_1.*": 0, "*.layer_2.weight": 1},
    ),
    "pegasus": published("PegasusForConditionalGeneration", "PegasusConfig", _bart, pairs, _OPT),
    "mbart": published(
        "MBartForConditionalGeneration",
        "MBartConfig",
        lambda layers: {**_bart(layers), "decoder_start_token_id": 2},
        pairs,
        _OPT,
    ),
    # ---- mixture of experts, state space ----
    "olmoe": published(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        partial(_decoder, num_experts=4, num_experts_per_tok=2),
        tokens,
        _LLAMA_EXPERTS,
    ),
    "gpt_oss": published(
        "GptOssForCausalLM",
        "GptOssConfig",
        partial(_decoder, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
        tokens,
        _LLAMA_EXPERTS,
    ),
    "granite_moe": published(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        partial(_decoder, num_local_experts=4, num_experts_per_tok=2),
        tokens,
        _LLAMA_EXPERTS,
    ),
    "deepseek_v3": published("DeepseekV3ForCausalLM", "DeepseekV3Config", _deepseek, tokens),
    "mamba": published(
        "MambaForCausalLM",
        "MambaConfig",
        partial(_mamba, time_step_rank=4),
        tokens,
    ),
    "mamba2": published(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        partial(_mamba, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
        tokens,
    ),
    "rwkv": published(
        "RwkvForCausalLM",
        "RwkvConfig",
        lambda layers: {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": layers + 1,  # it divides by one less
            "context_length": 8,
            "use_cache": False,
        },
        tokens,
    ),
    "recurrent_gemma": published(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        lambda layers: _decoder(
            layers,
            lru_width=WIDTH,
            attention_window_size=8,
            num_key_value_heads=1,
            block_types=("recurrent", "attention"),
        ),
        tokens,
    ),
    "jamba": published("JambaForCausalLM", "JambaConfig", _jamba, tokens),
    # ---- sound ----
    "wav2vec2": spoken_to("Wav2Vec2ForCTC", "Wav2Vec2Config", spoken, connected),
    "hubert": spoken_to("HubertForSequenceClassification", "HubertConfig", sounds),
    "wavlm": spoken_to("WavLMForSequenceClassification", "WavLMConfig", sounds),
    "sew": spoken_to("SEWForSequenceClassification", "SEWConfig", sounds),
    "whisper": published(
        "WhisperForConditionalGeneration", "WhisperConfig", _whisper, transcribed, _OPT
    ),
    "ast": published(
        "ASTForAudioClassification",
        "ASTConfig",
        partial(
            _vit, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8
        ),
        spectra,
        _VIT,
    ),
    # ---- images ----
    "deit": published("DeiTForImageClassification", "DeiTConfig", _vit, images, _VIT),
    "swin": published(
        "SwinForImageClassification",
        "SwinConfig",
        lambda layers: {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, layers],
            "num_heads": [2, 2],
            "window_size": 2,
            "drop_path_rate": 0.0,
            "num_labels": CLASSES,
        },
        images,
        {"*.fc1.*": 0, "*.fc2.weight": 1},
    ),
    "beit": published(
        "BeitForImageClassification",
        "BeitConfig",
        partial(_vit, use_relative_position_bias=True, drop_path_rate=0.0),
        images,
        {"*.fc1.*": 0, "*.fc2.weight": 1},
    ),
    "dinov2": published(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        _vit,
        images,
        {"*.fc1.*": 0, "*.fc2.weight": 1},
    ),
    "segformer": published(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        lambda layers: {
            "num_encoder_blocks": 2,
            "depths": [layers, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
            "num_labels": CLASSES,
        },
        segmented,
        micro_batches=1,
    ),
    "poolformer": published(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        lambda layers: {
            "num_encoder_blocks": 2,
            "depths": [layers, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "num_labels": CLASSES,
        },
        images,
    ),
    "mobilevit": published(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        _of_images(
            image_size=32,
            hidden_sizes=[8, 8, 8],
            neck_hidden_sizes=[4, 8, 8, 8, 8, 8, 16],
            num_attention_heads=2,
            expand_ratio=1.0,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        partial(images, side=2 * SIDE),
        micro_batches=1,
    ),
    "regnet": published(
        "RegNetForImageClassification",
        "RegNetConfig",
        lambda layers: {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [layers, 1],
            "groups_width": 4,
            "num_labels": CLASSES,
        },
        images,
        micro_batches=1,
    ),
    # ---- images and text; series ----
    "clip": published("CLIPModel", "CLIPConfig", _seen_and_read, captions, _OPT, 1, matched),
    "siglip": published("SiglipModel", "SiglipConfig", _seen_and_read, captions, _OPT, 1, paired),
    "blip": published("BlipForConditionalGeneration", "BlipConfig", _seen_and_read, told_images),
    "vilt": published(
        "ViltForQuestionAnswering",
        "ViltConfig",
        partial(_vit, vocab_size=VOCABULARY, max_position_embeddings=8),
        asked_images,
    ),
    "llava": published(
        "LlavaForConditionalGeneration", "LlavaConfig", _llava, shown_images, _LLAMA
    ),
    "patchtst": published(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        _patchtst,
        series,
        micro_batches=1,
    ),
}
