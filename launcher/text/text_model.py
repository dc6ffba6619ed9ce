"""TextModel: the logits of the next token, by plain torch, of any model that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.targets import list_arguments
from flowrun.launcher.text.kept_keys import KeptKeys
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama

_OWN = "positions"  # argument of flowrun's models that places tokens after those that were read
_KEYS = ("cache", "past_key_values")  # what transformers has called keys and values


@dataclass(kw_only=True)
class TextModel:
    """A module that gives, for tokens (B, T), logits (B, T, V) of the token after each.

    argument: of forward, that takes the tokens.  window: the most tokens that it reads at once.
    name: of the model, for errors.  cache: argument of forward, and part of its output, that holds
    keys and values of the rows of ids that it has `read`; _OWN: KeptKeys holds them; "": each token
    is a forward over all before it.
    """

    module: nn.Module
    argument: str
    window: int
    name: str
    cache: str = ""
    read: list[list[int]] = field(default_factory=list)
    keys: object = None

    @torch.no_grad()
    def next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return logits (B, V) of the token after each row of ids, of which the last `window`
        count; rows are of one length.

        Raises RecipeError where the model has no such logits.
        """
        windows = [[*row[-self.window :]] for row in rows]
        start, end = len(self.read[0]) if self.read else 0, len(windows[0])
        if start >= end or [window[:start] for window in windows] != self.read:
            start, self.read, self.keys = 0, [], None  # other texts
        device = next((each.device for each in self.module.parameters()), None)
        tokens = torch.tensor([window[start:] for window in windows], device=device)
        output = self._forward(tokens, start)
        if self.keys is not None:
            self.read = windows
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise _no_text(
                self.name, f"for tokens of shape {tuple(tokens.shape)} it gives {shape}, no logits"
            )
        return logits[:, -1].float().cpu()

    def _forward(self, tokens: Tensor, start: int) -> object:
        """Return the output for tokens (B, T), of which the first has the position `start`."""
        given = {self.argument: tokens}
        if self.cache == _OWN:
            places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            self.keys = KeptKeys(self.keys)
            with self.keys:
                return self.module(**given, **{_OWN: places.expand_as(tokens)})
        if not self.cache:
            return self.module(**given)
        output = self.module(**given, **{self.cache: self.keys}, use_cache=True)
        self.keys = getattr(output, self.cache, None)
        return output


def text_model(
    module: nn.Module, inputs: Mapping[str, str], window: int | None, name: str
) -> TextModel:
    """Return a module as a TextModel, in evaluation mode.

    inputs: argument -> batch field, as `task.inputs` says it; empty: forward's own names.
    window: the most tokens that training had; None: the model says how many it takes.  name: for
    errors.  Raises RecipeError for a model that predicts no next token.
    """
    arguments = list_arguments(module.forward)
    argument = _argument_of_tokens(arguments, inputs, name)
    cache = _OWN if type(module) in (GPT, Llama) else ""
    if hasattr(module, "can_generate"):  # a model of transformers
        config = getattr(module, "config", None)
        if not module.can_generate() or getattr(config, "is_encoder_decoder", False):  # type: ignore[operator]
            raise _no_text(name, "it predicts no next token (transformers' can_generate)")
        window = getattr(config, "max_position_embeddings", None) or window
        if not getattr(module, "_is_stateful", False):
            cache = next((each for each in arguments if each in _KEYS), "")
    if not window:
        raise _no_text(name, "nothing says how many tokens it reads at once")
    return TextModel(module=module.eval(), argument=argument, window=window, name=name, cache=cache)


def _argument_of_tokens(arguments: Mapping[str, bool], inputs: Mapping[str, str], name: str) -> str:
    """Return the argument of forward that takes tokens, and which is all that it needs."""
    fed = inputs or dict.fromkeys(arguments, "")
    argument = next((name for name, field in fed.items() if _is_tokens(name, field)), None)
    if argument is None:
        raise _no_text(name, f"none of its arguments ({', '.join(fed) or 'none'}) takes tokens")
    others = [each for each, must in arguments.items() if must and each != argument]
    if others:
        raise _no_text(name, f"it needs {', '.join(others)} with the tokens")
    return argument


def _is_tokens(*words: str) -> bool:
    return any("token" in word or word == "input_ids" for word in words)


def _no_text(name: str, why: str) -> RecipeError:
    return RecipeError(
        "model",
        f"{name} writes no text: {why}.",
        "A model of text takes tokens (B, T), and gives logits (B, T, V) of the token after each.",
    )
