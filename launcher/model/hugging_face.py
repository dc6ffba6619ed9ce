"""flowrun's own models by Hugging Face's names: a table for each class, read in both directions.

Their config says what a class computes; where theirs can compute something else than ours, it is
refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama

KEY = "model.weights"
CONFIG = "config.json"


@dataclass(frozen=True)
class Form:
    """A form says how a weight (out, in), or its bias (out,), holds one layer or three, q, k and v.

    split: (tensor, heads) -> layers, each (out, in).  join: (layers, heads) -> tensor.
    """

    layers: int
    split: Callable[[Tensor, int], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], int], Tensor]


def _turn(x: Tensor) -> Tensor:
    """Conv1D of GPT-2 has its weights as (in, out)."""
    return x.mT if x.dim() == 2 else x


def _join_heads(qkv: Sequence[Tensor], heads: int) -> Tensor:
    return torch.stack([x.unflatten(0, (heads, -1)) for x in qkv], dim=1).flatten(0, 2)


def _split_heads(x: Tensor, heads: int) -> Sequence[Tensor]:
    return [each.flatten(0, 1) for each in x.unflatten(0, (heads, 3, -1)).unbind(1)]


PLAIN = Form(1, lambda x, _: [x], lambda layers, _: layers[0])
TURNED = Form(1, lambda x, _: [_turn(x)], lambda layers, _: _turn(layers[0]))
HEADS = Form(3, _split_heads, _join_heads)  # rows (heads, 3, head width)
THIRDS = Form(  # (in, q k v)
    3, lambda x, _: _turn(x).chunk(3), lambda layers, _: _turn(torch.cat([*layers]))
)
AFTER_TWO = Form(  # two rows before it, which nobody reads
    1, lambda x, _: [x[2:]], lambda layers, _: nn.functional.pad(layers[0], (0, 0, 2, 0))
)


@dataclass(frozen=True)
class Row:
    """The same layers under our names and theirs; {} is the number of a block."""

    ours: str
    theirs: str
    form: Form = PLAIN
    their_form: Form = PLAIN


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The class of transformers that computes what one of ours does.

    name: of the class.  config: the arguments of its config.  compared: those that change what it
    computes, and that shapes do not show.  heads: of attention.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    compared: tuple[str, ...]
    rows: tuple[Row, ...]
    depth: int
    heads: int = 1
    also: Mapping[str, Any] = field(default_factory=dict)  # arguments for training alone

    def to_theirs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors by their names."""
        return self._convert(state, back=False)[0]

    def to_ours(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Return their tensors by our names, and the names of those that have none here."""
        return self._convert(state, back=True)

    def _convert(
        self, state: Mapping[str, Tensor], back: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        made: dict[str, Tensor] = {}
        read: set[str] = set()
        for ours, theirs, row in self._layers():
            sides = ((ours, row.form), (theirs, row.their_form))
            (names, form), (new, new_form) = reversed(sides) if back else sides
            if not all(name in state for name in names):
                continue
            read |= {*names}
            layers = [x for name in names for x in form.split(state[name], self.heads)]
            size = new_form.layers
            for k, name in enumerate(new):
                made[name] = new_form.join(layers[k * size : (k + 1) * size], self.heads)
        return made, [name for name in state if name not in read]

    def _layers(self) -> Iterator[tuple[list[str], list[str], Row]]:
        """Yield our names, theirs and the row, of each block's weights and biases."""
        for row in self.rows:
            for block in range(self.depth if "{}" in row.ours else 1):
                for kind in ("",) if row.ours.endswith(".bias") else (".weight", ".bias"):
                    yield (
                        [name.format(block) + kind for name in row.ours.split()],
                        [name.format(block) + kind for name in row.theirs.split()],
                        row,
                    )


# ---- one function a class ------------------------------------------------------------------------


def _gpt(model: GPT) -> Counterpart:
    """GPT-2; without biases it is what OPT computes with enable_bias=False."""
    return _gpt2(model) if model.blocks[0].mlp.fc1.bias is not None else _opt(model)  # type: ignore[union-attr]


def _gpt2(model: GPT) -> Counterpart:
    attention: Any = model.blocks[0].attn
    ours = "blocks.{}.attn.q blocks.{}.attn.k blocks.{}.attn.v"
    qkv = (ours, PLAIN) if attention.separate_qkv else ("blocks.{}.attn.qkv", HEADS)
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
            Row("embed.wte", "transformer.wte"),
            Row("embed.wpe", "transformer.wpe"),
            Row("blocks.{}.ln1", f"{block}.ln_1"),
            Row(qkv[0], f"{block}.attn.c_attn", qkv[1], THIRDS),
            Row("blocks.{}.attn.proj", f"{block}.attn.c_proj", PLAIN, TURNED),
            Row("blocks.{}.ln2", f"{block}.ln_2"),
            Row("blocks.{}.mlp.fc1", f"{block}.mlp.c_fc", PLAIN, TURNED),
            Row("blocks.{}.mlp.fc2", f"{block}.mlp.c_proj", PLAIN, TURNED),
            Row("norm", "transformer.ln_f"),
            Row("head", "lm_head"),
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


def _opt(model: GPT) -> Counterpart:
    attention: Any = model.blocks[0].attn
    width = model.norm.weight.numel()
    ours = "blocks.{}.attn.q blocks.{}.attn.k blocks.{}.attn.v"
    qkv = (ours, PLAIN) if attention.separate_qkv else ("blocks.{}.attn.qkv", HEADS)
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
            Row("embed.wte", "model.decoder.embed_tokens"),
            Row("embed.wpe", "model.decoder.embed_positions", PLAIN, AFTER_TWO),
            Row("blocks.{}.ln1", f"{block}.self_attn_layer_norm"),
            Row(qkv[0], theirs, qkv[1]),
            Row("blocks.{}.attn.proj", f"{block}.self_attn.out_proj"),
            Row("blocks.{}.ln2", f"{block}.final_layer_norm"),
            Row("blocks.{}.mlp.fc1", f"{block}.fc1"),
            Row("blocks.{}.mlp.fc2", f"{block}.fc2"),
            Row("norm", "model.decoder.final_layer_norm"),
            Row("head", "lm_head"),
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


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
            Row("embed", "model.embed_tokens"),
            Row("blocks.{}.norm1", f"{theirs}.input_layernorm"),
            *(Row(f"blocks.{{}}.attn.{name}", f"{theirs}.self_attn.{name}_proj") for name in "qkv"),
            Row("blocks.{}.attn.proj", f"{theirs}.self_attn.o_proj"),
            Row("blocks.{}.norm2", f"{theirs}.post_attention_layernorm"),
            *(
                Row(f"blocks.{{}}.mlp.{name}", f"{theirs}.mlp.{name}_proj")
                for name in ("gate", "up", "down")
            ),
            Row("norm", "model.norm"),
            Row("head", "lm_head"),
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
            Row("embed.token", "bert.embeddings.word_embeddings"),
            Row("embed.position", "bert.embeddings.position_embeddings"),
            Row("embed.segment", "bert.embeddings.token_type_embeddings"),
            Row("embed.norm", "bert.embeddings.LayerNorm"),
            Row("blocks.{}.attn.qkv", qkv, HEADS),
            Row("blocks.{}.attn.proj", f"{block}.attention.output.dense"),
            Row("blocks.{}.ln1", f"{block}.attention.output.LayerNorm"),
            Row("blocks.{}.mlp.fc1", f"{block}.intermediate.dense"),
            Row("blocks.{}.mlp.fc2", f"{block}.output.dense"),
            Row("blocks.{}.ln2", f"{block}.output.LayerNorm"),
            Row("head.dense", f"{head}.transform.dense"),
            Row("head.norm", f"{head}.transform.LayerNorm"),
            Row("head.out", f"{head}.decoder"),
            Row("head.out.bias", f"{head}.bias"),  # it has two names
        ),
        depth=len(model.blocks),
        heads=attention.heads,
    )


_COUNTERPARTS: Mapping[type, Callable[[Any], Counterpart]] = {
    GPT: _gpt,
    Llama: _llama,
    BERT: _bert,
}


def counterpart_of(model: nn.Module) -> Counterpart | None:
    """Return the class of transformers that computes what a model of ours does; None: there is
    none.
    """
    found = _COUNTERPARTS.get(type(model))
    return found(model) if found else None


# ---- files -> model ------------------------------------------------------------------------------


def rename_to_ours(
    model: nn.Module, path: Path, found: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return what a folder of Hugging Face's holds by the names of a model of ours, if it is one.

    path: the folder, or a file in it.  found: its tensors; of any other model, and by our own names
    already, they are returned as they are.  Raises RecipeError where their config says that their
    model computes something else.
    """
    file = (path if path.is_dir() else path.parent) / CONFIG
    same = counterpart_of(model)
    if same is None or not file.is_file() or {*found} <= {*model.state_dict()}:
        return found
    theirs = _class_of(same)
    _check_config(same, theirs, file, type(model).__name__)
    prefix = f"{theirs.base_model_prefix}."
    if not any(name.startswith(prefix) for name in found):  # saved without the head
        found = {f"{prefix}{name}": value for name, value in found.items()}
    ours, left = same.to_ours(found)
    needless = re.compile("|".join(theirs._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    return {**ours, **{name: found[name] for name in left if not needless.search(name)}}


def _check_config(same: Counterpart, theirs: Any, file: Path, name: str) -> None:
    kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if kind != same.kind:
        raise RecipeError(
            KEY,
            f"{file.parent} is of model_type {kind!r}; this {name} is {same.kind!r} to it.",
            "Train it as its own class: model._target_=transformers.…",
        )
    there = theirs.config_class.from_pretrained(file.parent).to_dict()
    here = theirs.config_class(**same.config).to_dict()
    unlike = [
        f"{key} is {there[key]} there and {here[key]} here"
        for key in same.compared
        if there[key] != here[key]
    ]
    if unlike:
        raise RecipeError(
            KEY,
            f"{file.parent} computes something else than this {name}: {', '.join(unlike)}.",
            f"Change the model's arguments, or train it as transformers.{theirs.__name__}.",
        )


# ---- model -> theirs -----------------------------------------------------------------------------


def make_theirs(model: nn.Module, also: Mapping[str, Any]) -> Any:
    """Return a model of transformers that computes what `model` does: itself, if it is one.

    also: arguments of the config that the model does not know, such as ids of tokens.  Raises
    RecipeError for a class that has no counterpart.
    """
    if hasattr(model, "save_pretrained"):
        return model
    same = counterpart_of(model)
    if same is None:
        raise RecipeError(
            "model._target_",
            f"transformers has no class that computes what {type(model).__name__} does.",
            "It has one for its own models, and for "
            f"{', '.join(each.__name__ for each in _COUNTERPARTS)} of flowrun.models.",
        )
    theirs = _class_of(same)
    config = theirs.config_class(**{**same.config, **same.also, **also})
    made = theirs(config)
    given = same.to_theirs(model.state_dict())
    state = made.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in given}
    assert all(id(value) in filled for value in state.values()), "a table names all weights"
    made.load_state_dict(given, strict=False)  # of a tied weight one name will do
    return made.eval()


def _class_of(same: Counterpart) -> Any:
    return getattr(import_transformers(), same.name)


def import_transformers() -> Any:
    """Return the package, which then draws no bars of its own.  Raises RecipeError."""
    try:
        import transformers
    except ImportError as error:
        instead = "pip install 'flowrun[text]'"
        raise RecipeError("model", "this needs the package transformers.", instead) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
