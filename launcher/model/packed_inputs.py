"""Packed data goes into a model: which arguments take it, and how models of transformers attend.

A packed sample holds several documents (launcher/data/corpus/packed.py).  A model takes their
lengths and attends within each (models/causal_attention.py), or it is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.stacked import DOCUMENTS, POSITIONS
from flowrun.launcher.model.hugging_face.convert_models import import_transformers
from flowrun.models.causal_attention import causal_attention

_NAME = "flowrun_documents"  # of the attention, among those of transformers
_LOCAL = "sliding_window"
_ATTENDS = {"full_attention", "sliding_attention"}  # kinds of layers; others carry a state along
# what a module of transformers may hand to its attention besides, and what changes no number of it
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def is_packed(item: Mapping[str, Tensor]) -> bool:
    """Return True for a sample that holds several documents."""
    return DOCUMENTS in item and POSITIONS in item


def packed_inputs(
    model: nn.Module, item: Mapping[str, Tensor], inputs: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments of the model that take documents and positions -> fields.

    A model of transformers then attends within documents.  inputs: what the recipe maps.  Raises
    RecipeError for a model that would attend across documents.
    """
    if not is_packed(item):
        return {}
    given = {field: argument for argument, field in inputs.items()}
    theirs = _of_transformers(model)
    if theirs is not None:
        _attend_within_documents(theirs)
        return {"position_ids": POSITIONS, DOCUMENTS: DOCUMENTS}
    names = inspect.signature(model.forward).parameters
    if DOCUMENTS not in given and DOCUMENTS not in names:
        raise _refusal(model, "its forward takes no documents")
    found = {} if DOCUMENTS in given else {DOCUMENTS: DOCUMENTS}
    if POSITIONS not in given:
        place = next((name for name in (POSITIONS, "position_ids") if name in names), None)
        if place is None:
            raise _refusal(model, "its forward does not take positions, which start again in each")
        found[place] = POSITIONS
    return found


def _refusal(model: nn.Module, why: str) -> RecipeError:
    return RecipeError(
        "data.pack",
        f"{type(model).__name__} would attend across the documents of a packed sample: {why}.",
        "Write data.pack=false. A model of your own takes positions (B, T) and documents (B, N),"
        " the lengths of those of each sample, which flowrun.models.causal_attention reads.",
    )


# ---- models of transformers ----------------------------------------------------------------------


def _of_transformers(model: nn.Module) -> object:
    """Return the model of transformers that this is, or that peft wraps; None: it is none."""
    base: object = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base if hasattr(base, "set_attn_implementation") else None


def _attend_within_documents(model: Any) -> None:
    """Let every layer attend by causal_attention, or raise RecipeError."""
    parts = [each for each in model.modules() if hasattr(each, "set_attn_implementation")]
    for part in parts:
        kinds = {*(getattr(part.config, "layer_types", None) or ())} - _ATTENDS
        if kinds or getattr(part, "_is_stateful", False):
            raise _refusal(model, f"it has layers of {', '.join(sorted(kinds)) or 'a state'}")
        if getattr(part.config, "is_encoder_decoder", False):
            raise _refusal(model, "it has an encoder")
        if not part._supports_attention_backend:
            raise _refusal(model, "its attention is not transformers' AttentionInterface")
    import_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    if any(each.config._attn_implementation != _NAME for each in parts):
        raise _refusal(model, "it keeps an attention of its own")


def _mask(*given: Any, **how: Any) -> None:
    """Make no mask, as `_attention` needs none; refuse what is not causal attention alone."""
    length = how["kv_length"]
    for name, wrong in {
        "padding is masked (attention_mask)": how.get("attention_mask") is not None,
        "some layers see a part of the tokens": how.get("local_size", length) < length,
        "it sees later tokens": "allow_is_bidirectional_skip" in how,
        "it has a mask of its own": bool(how.get("use_vmap")),
    }.items():
        if wrong:
            raise RecipeError("data.pack", f"packed documents need causal attention: {name}.")


def _list_unknown(more: Mapping[str, object]) -> list[str]:
    """Return what a layer asks of its attention that may change a number of it."""
    asked = {name for name, value in more.items() if value is not None and value is not False}
    return sorted(asked - _HARMLESS)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within documents, as transformers calls an attention.

    query: (B, H, T, C).  key, value: (B, G, T, C).  documents: their lengths (B, N).  Return the
    output (B, T, H, C).  Raises RecipeError for what causal attention does not have.
    """
    if more.get(_LOCAL) is not None and more[_LOCAL] >= query.shape[2]:
        del more[_LOCAL]
    causal = more.pop("is_causal", None)
    wrong = _list_unknown(more)
    name = type(module).__name__
    if attention_mask is not None:
        wrong.append("attention_mask")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        wrong.append("is_causal=False")
    if dropout:
        wrong.append(f"dropout={dropout} of attention weights")
    if documents is None:
        raise RecipeError("data.pack", f"{name} is not handed the documents of packed data.")
    if wrong or key.shape[2] != query.shape[2]:
        what = ", ".join(wrong) or "keys of other tokens"
        raise RecipeError("data.pack", f"attention within documents knows no {what} ({name}).")
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value))
    out = causal_attention(query, key, value, documents, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
