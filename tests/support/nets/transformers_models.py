# ruff: noqa: E501 (rows of a table)
"""Architectures of `transformers`, tiny: each as its authors wrote it, with random weights and no
dropout.  Each is called with labels and gives its own loss, unless a loss is named.
"""

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
    return {"input_ids": ids.masked_fill(guessed, 3), "attention_mask": seen, "labels": labels}


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
    return {
        "input_values": torch.randn(samples, 240, generator=generator),
        "labels": _classes(generator, samples),
    }


def spoken(generator: torch.Generator, samples: int) -> Batch:
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

# Numbers by which configurations call what makes a model small; each takes those that it knows.
_SIZES = {
    16: "hidden_size d_model n_embd dim word_embed_proj_dim image_size max_position_embeddings",
    24: "intermediate_size ffn_dim hidden_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads d_kv",
    VOCABULARY: "vocab_size",
    LENGTH: "n_positions",
    8: "patch_size",
    2: "num_key_value_heads eos_token_id",
    1: "bos_token_id",
    0: "pad_token_id use_cache",
}
TINY = {name: size for size, names in _SIZES.items() for name in names.split()}
TINY["use_cache"] = False
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
_WAVE = {
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}
# with the balance loss of their routers, of all tokens of a batch
_ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "micro_batches": 1}
_EXPERTS = {"num_experts": 4, **_ROUTED}
_LOCAL = {"num_local_experts": 4, **_ROUTED}


def tiny(config: Any, layers: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a configuration's class: TINY, no dropout, a number of layers, and `more`, of
    which a function is given the layers.  Configurations inside are made tiny too.
    """
    given: dict[str, Any] = {"num_labels": CLASSES}
    for name, value in config.to_dict().items():
        if name in ("text_config", "vision_config"):
            inner = getattr(config, name)
            given[name] = {"model_type": inner.model_type, **tiny(inner, layers, {})}
            given[name] |= {"projection_dim": 8} if hasattr(inner, "projection_dim") else {}
        elif name in LAYERS:
            given[name] = layers
        elif name in TINY:
            given[name] = TINY[name]
        elif isinstance(value, float) and "drop" in name:
            given[name] = 0.0
    return given | {n: v(layers) if callable(v) else v for n, v in more.items()}


# ---- Megatron's layouts --------------------------------------------------------------------------


def _split(columns: str, rows: str) -> dict[str, int]:
    """Weights by the ends of their names: those that columns divide, with a bias where they end in
    `*`, and those that rows divide.
    """
    return {f"*.{name}": dim for dim, names in enumerate((columns, rows)) for name in names.split()}


_LLAMA_EXPERTS = _split("q_proj.weight k_proj.weight v_proj.weight", "o_proj.weight")
_LLAMA = {**_LLAMA_EXPERTS, **_split("gate_proj.weight up_proj.weight", "down_proj.weight")}
_BERT_MLP = _split("intermediate.dense.*", "layer.*.output.dense.weight")
_BERT = {
    **_split("self.query.* self.key.* self.value.*", "attention.output.dense.weight"),
    **_BERT_MLP,
}
_MLP = _split("fc1.*", "fc2.weight")
_VIT = {**_split("q_proj.* k_proj.* v_proj.*", "o_proj.weight"), **_MLP}
_OF_OPT = _split("q_proj.* k_proj.* v_proj.*", "out_proj.weight")
_OPT = {**_OF_OPT, **_MLP}
_SPEECH = {**_OF_OPT, **_split("intermediate_dense.*", "output_dense.weight")}
_NEOX = _split("dense_h_to_4h.*", "dense_4h_to_h.weight")
OUTPUTS = {"*.weight": 0}  # where no layout is customary: every weight along its first dim


def published(
    name: str,
    batch: Callable[[torch.Generator, int], Batch],
    split: Mapping[str, int] = OUTPUTS,
    micro_batches: int = MICRO_BATCHES,
    loss: Measure = own_loss,
    **more: Any,
) -> Architecture:
    """A class of transformers; what its configuration has beside what is TINY."""

    def make(layers: int) -> nn.Module:
        make_importable()
        import transformers

        model_class = getattr(transformers, name)
        config = model_class.config_class
        return model_class(config(**tiny(config(), layers, more)))

    return Architecture(name, make, batch, split, loss=loss, micro_batches=micro_batches)


def spoken_to(name: str, batch: Callable[[torch.Generator, int], Batch]) -> Architecture:
    """A class of the wav2vec 2.0 family, fine-tuned: its convolutions stay as they are."""
    whole = published(name, batch, _SPEECH, **_WAVE)

    def make(layers: int) -> nn.Module:
        model: Any = whole.make(layers)
        model.freeze_feature_encoder()
        return model  # type: ignore[no-any-return]

    return replace(whole, make=make)


# fmt: off
TRANSFORMERS: Mapping[str, Architecture] = {
    "gpt2": published("GPT2LMHeadModel", tokens, split={"*.mlp.c_fc.weight": 1, "*.mlp.c_fc.bias": 0, "*.mlp.c_proj.weight": 0}),
    "llama": published("LlamaForCausalLM", padded_tokens, split=_LLAMA),
    "qwen2": published("Qwen2ForCausalLM", tokens, split=_LLAMA),
    "mistral": published("MistralForCausalLM", tokens, split=_LLAMA),
    "gemma": published("GemmaForCausalLM", tokens, split=_LLAMA, head_dim=4),
    "neox": published("GPTNeoXForCausalLM", tokens, split=_NEOX),
    "opt": published("OPTForCausalLM", padded_tokens, split=_OPT, pad_token_id=1),
    "mixtral": published("MixtralForCausalLM", tokens, split=_LLAMA_EXPERTS, **_LOCAL, sliding_window=None),
    "qwen2_moe": published("Qwen2MoeForCausalLM", tokens, split=_LLAMA_EXPERTS, moe_intermediate_size=8, shared_expert_intermediate_size=8, **_EXPERTS),
    "bert": published("BertForMaskedLM", masked_tokens, split=_BERT),
    "roberta": published("RobertaForMaskedLM", masked_tokens, split=_BERT, pad_token_id=1),
    "distilbert": published("DistilBertForMaskedLM", masked_tokens, split={"*.q_lin.*": 0, "*.k_lin.*": 0, "*.v_lin.*": 0, "*.out_lin.weight": 1, "*.lin1.*": 0, "*.lin2.weight": 1}),
    "t5": published("T5ForConditionalGeneration", pairs, split={"*.q.weight": 0, "*.k.weight": 0, "*.v.weight": 0, "*.o.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1}, decoder_start_token_id=0),
    "bart": published("BartForConditionalGeneration", pairs, split=_OPT, pad_token_id=1),
    "vit": published("ViTForImageClassification", images, split=_VIT),
    "convnext": published("ConvNextForImageClassification", images, split={"*.pwconv1.*": 0, "*.pwconv2.weight": 1}, patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=lambda n: [n, 1]),
    "resnet": published("ResNetForImageClassification", images, split={"classifier.1.*": 0}, micro_batches=1, embedding_size=8, hidden_sizes=[8, 16], depths=lambda n: [n, 1], layer_type="basic"),
    "bloom": published("BloomForCausalLM", tokens, split=_NEOX),
    "falcon": published("FalconForCausalLM", tokens, split={"*.dense_h_to_4h.weight": 0, "*.dense_4h_to_h.weight": 1}, intermediate_size=24, num_key_value_heads=2, multi_query=True),
    "phi": published("PhiForCausalLM", tokens, split={"*.q_proj.*": 0, "*.k_proj.*": 0, "*.v_proj.*": 0, "*.dense.weight": 1, "*.fc1.*": 0, "*.fc2.weight": 1}),
    "qwen3": published("Qwen3ForCausalLM", tokens, split=_LLAMA, head_dim=4),
    "gemma2": published("Gemma2ForCausalLM", tokens, split=_LLAMA, head_dim=4, query_pre_attn_scalar=4, sliding_window=4),
    "gemma3": published("Gemma3ForCausalLM", padded_tokens, split=_LLAMA, head_dim=4, query_pre_attn_scalar=4, sliding_window=4),
    "electra": published("ElectraForMaskedLM", masked_tokens, split=_BERT, embedding_size=8),
    "albert": published("AlbertForMaskedLM", masked_tokens, split={"*.query.*": 0, "*.key.*": 0, "*.value.*": 0, "*.attention.dense.weight": 1, "*.ffn.*": 0, "*.ffn_output.weight": 1}, embedding_size=8),
    "deberta_v2": published("DebertaV2ForMaskedLM", masked_tokens, split=_BERT_MLP, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False),
    "fnet": published("FNetForMaskedLM", unmasked_tokens, split=_BERT_MLP, num_attention_heads=4),
    "modernbert": published("ModernBertForMaskedLM", masked_tokens, split={"*.Wi.weight": 0, "*.Wo.weight": 1}, cls_token_id=1, sep_token_id=2, local_attention=4, layer_types=None),
    "xlnet": published("XLNetLMHeadModel", tokens, split={"*.layer_1.*": 0, "*.layer_2.weight": 1}, mem_len=None),
    "pegasus": published("PegasusForConditionalGeneration", pairs, split=_OPT),
    "mbart": published("MBartForConditionalGeneration", pairs, split=_OPT, decoder_start_token_id=2, pad_token_id=1),
    "olmoe": published("OlmoeForCausalLM", tokens, split=_LLAMA_EXPERTS, **_EXPERTS),
    "gpt_oss": published("GptOssForCausalLM", tokens, split=_LLAMA_EXPERTS, head_dim=4, **_LOCAL, sliding_window=4),
    "granite_moe": published("GraniteMoeForCausalLM", tokens, split=_LLAMA_EXPERTS, **_LOCAL),
    "deepseek_v3": published("DeepseekV3ForCausalLM", tokens, num_hidden_layers=lambda n: n + 1, num_key_value_heads=4, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4),
    "mamba": published("MambaForCausalLM", tokens, state_size=4, time_step_rank=4, intermediate_size=32),
    "mamba2": published("Mamba2ForCausalLM", tokens, state_size=4, head_dim=8, n_groups=2, chunk_size=4),
    "rwkv": published("RwkvForCausalLM", tokens, num_hidden_layers=lambda n: n + 1, context_length=8, intermediate_size=64),
    "recurrent_gemma": published("RecurrentGemmaForCausalLM", tokens, num_key_value_heads=1, max_position_embeddings=16, lru_width=16, attention_window_size=8, block_types=("recurrent", "attention")),
    "jamba": published("JambaForCausalLM", tokens, num_hidden_layers=lambda n: 2 * n, **_EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    "wav2vec2": spoken_to("Wav2Vec2ForCTC", spoken),
    "hubert": spoken_to("HubertForSequenceClassification", sounds),
    "wavlm": spoken_to("WavLMForSequenceClassification", sounds),
    "sew": spoken_to("SEWForSequenceClassification", sounds),
    "whisper": published("WhisperForConditionalGeneration", transcribed, split=_OPT, max_position_embeddings=16, num_mel_bins=8, max_source_positions=8, max_target_positions=8, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
    "ast": published("ASTForAudioClassification", spectra, split=_VIT, image_size=16, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8),
    "deit": published("DeiTForImageClassification", images, split=_VIT),
    "swin": published("SwinForImageClassification", images, split=_MLP, patch_size=2, embed_dim=8, num_layers=2, depths=lambda n: [2, n], num_heads=[2, 2], window_size=2),
    "beit": published("BeitForImageClassification", images, split=_MLP, use_relative_position_bias=True),
    "dinov2": published("Dinov2ForImageClassification", images, split=_MLP, intermediate_size=24),
    "segformer": published("SegformerForSemanticSegmentation", segmented, micro_batches=1, num_encoder_blocks=2, depths=lambda n: [n, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8),
    "poolformer": published("PoolFormerForImageClassification", images, num_encoder_blocks=2, depths=lambda n: [n, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
    "mobilevit": published("MobileViTForImageClassification", partial(images, side=2 * SIDE), micro_batches=1, image_size=32, patch_size=2, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 8, 8, 8, 8, 8, 16], num_attention_heads=2, expand_ratio=1.0),
    "regnet": published("RegNetForImageClassification", images, micro_batches=1, embedding_size=8, hidden_sizes=[8, 16], depths=lambda n: [n, 1], groups_width=4),
    "clip": published("CLIPModel", captions, split=_OPT, micro_batches=1, loss=matched, projection_dim=8),
    "siglip": published("SiglipModel", captions, split=_OPT, micro_batches=1, loss=paired, projection_dim=8),
    "blip": published("BlipForConditionalGeneration", told_images, projection_dim=8),
    "vilt": published("ViltForQuestionAnswering", asked_images, max_position_embeddings=8),
    "llava": published("LlavaForConditionalGeneration", shown_images, split=_LLAMA, image_token_index=IMAGE, image_seq_length=4, vision_feature_layer=-1),
    "patchtst": published("PatchTSTForPrediction", series, micro_batches=1, num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4),
}
