"""A Llama of transformers as small as can be."""

from typing import Any

import transformers

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16, "vocab_size": 320, "max_position_embeddings": 64}


def small_llama(**changes: Any) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))
