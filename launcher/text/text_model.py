"""TextModel: the logits of the next token, by plain torch, of any model that has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError

_KEYS = ("cache", "past_key_values")  # what transformers has called keys and values


@dataclass
class ReadIds:
    """The ids that a model of transformers has read, with their keys and values.

    argument: of forward, and part of its output, that holds these.
    """

    argument: str
    ids: list[int] = field(default_factory=list)
    keys: object = None

    def rest_of(self, ids: list[int]) -> list[int]:
        """Return those of `ids` that are still to be read; what was read and is not their beginning
        is forgotten.
        """
        if self.keys is None or len(self.ids) >= len(ids) or ids[: len(self.ids)] != self.ids:
            self.ids, self.keys = [], None
        return ids[len(self.ids) :]


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A module that gives, for tokens (1, T), logits (1, T, V) of the token after each.

    argument: of forward, that takes the tokens.  window: the most tokens that it reads at once.
    name: of the model, for errors.  read: of a model that keeps keys and values; None: each token
    is a forward over all before it.
    """

    module: nn.Module
    argument: str
    window: int
    name: str
    read: ReadIds | None = None

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return logits (V,) of the token after `ids`, of which the last `window` count.

        Raises RecipeError where the model has no such logits.
        """
        window = [*ids[-self.window :]]
        given, kept = window, {}
        if self.read is not None:
            given = self.read.rest_of(window)
            kept = {self.read.argument: self.read.keys, "use_cache": True}
        tokens = torch.tensor([given], device=_device_of(self.module))
        output = self.module(**{self.argument: tokens}, **kept)
        if self.read is not None:
            self.read.ids, self.read.keys = window, getattr(output, self.read.argument, None)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise no_text(
                self.name, f"for tokens of shape {tuple(tokens.shape)} it gives {shape}, no logits"
            )
        return logits[0, -1].float().cpu()


def text_model(
    module: nn.Module, inputs: Mapping[str, str], window: int | None, name: str
) -> TextModel:
    """Return a module as a TextModel, in evaluation mode.

    inputs: argument -> batch field, as `task.inputs` says it; empty: forward's own names.
    window: the most tokens that training had; None: the model says how many it takes.  name: for
    errors.  Raises RecipeError for a model that predicts no next token.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    argument = _argument_of_tokens(named, inputs, name)
    read = None
    if hasattr(module, "can_generate"):  # a model of transformers
        window = _window_of(module, window, name)
        read = _keeper_of(module, named)
    if window is None:
        raise no_text(name, "nothing says how many tokens it reads at once")
    return TextModel(module=module.eval(), argument=argument, window=window, name=name, read=read)


def _argument_of_tokens(
    named: Sequence[inspect.Parameter], inputs: Mapping[str, str], name: str
) -> str:
    """Return the argument of forward that takes tokens, and which is all that it needs.

    named: its parameters.  inputs, name: see text_model.
    """
    fed = dict(inputs) or {p.name: "" for p in named}
    argument = next((name for name, field in fed.items() if _is_tokens(name, field)), None)
    if argument is None:
        raise no_text(name, f"none of its arguments ({', '.join(fed) or 'none'}) takes tokens")
    others = [p.name for p in named if p.default is p.empty and p.name != argument]
    if others:
        raise no_text(name, f"it needs {', '.join(others)} with the tokens")
    return argument


def _window_of(module: nn.Module, window: int | None, name: str) -> int | None:
    """Return the most tokens that a model of transformers reads, or `window` if it says none."""
    config = getattr(module, "config", None)
    if not module.can_generate() or getattr(config, "is_encoder_decoder", False):  # type: ignore[operator]
        raise no_text(name, "it predicts no next token (transformers' can_generate)")
    return int(getattr(config, "max_position_embeddings", None) or window or 0) or None


def _keeper_of(module: nn.Module, named: Sequence[inspect.Parameter]) -> ReadIds | None:
    """Return what keeps the keys and values of a model; None for one that has none."""
    if getattr(module, "_is_stateful", False):
        return None
    keys = next((p.name for p in named if p.name in _KEYS), None)
    return ReadIds(keys) if keys else None


def _is_tokens(*words: str) -> bool:
    return any("token" in word or word == "input_ids" for word in words)


def no_text(name: str, why: str) -> RecipeError:
    """Return the error for a model that writes no text."""
    return RecipeError(
        "model",
        f"{name} writes no text: {why}.",
        "A model of text takes tokens (B, T), and gives logits (B, T, V) of the token after each.",
    )


def _device_of(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))
