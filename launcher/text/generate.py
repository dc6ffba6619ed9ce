"""Text, token by token: each is drawn from the logits of those before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.text.codec import KEY, Codec
from flowrun.launcher.text.text_model import TextModel

_SEEDS = range(-(1 << 63), 1 << 64)  # that torch takes


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A drawing says how many tokens are drawn, and how.

    tokens: the most.  temperature: divides the logits; 0: always the likeliest token.  top_k: the
    number of the likeliest that are drawn from; 0: all.  seed: of the random numbers.  Raises
    PlacedError for a number that no text can be drawn by.
    """

    tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            problem = "a temperature is 0 or a number above 0."
            raise CommandLineError(f"--temperature {self.temperature}", problem)
        if self.seed not in _SEEDS:
            problem = "torch takes no such seed: it has more than 64 bits."
            raise CommandLineError(f"--seed {self.seed}", problem)


def generate(
    model: TextModel, codec: Codec, prompt: Sequence[int], drawing: Drawing
) -> Iterator[str]:
    """Yield pieces of text that follow the prompt, as they are made; an id that ends a text ends it
    earlier than `drawing` says.

    model, codec: of the same ids.  prompt: at least one.  Raises RecipeError where they are not.
    """
    ids = [*prompt]
    decode = codec.decoder(ids)
    generator = torch.Generator().manual_seed(drawing.seed)
    for _ in range(drawing.tokens):
        logits = model.next_logits(ids)
        if len(logits) < codec.size:
            raise RecipeError(
                KEY,
                f"the tokenizer has {codec.size} ids, and {model.name} logits of {len(logits)}.",
                "Give the tokenizer that its data was made with: --tokenizer FOLDER.",
            )
        token = draw(logits[: codec.size], drawing, generator)
        if token in codec.ends:
            return
        ids.append(token)
        yield decode(token)


def draw(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    """Return the number of a token, drawn from logits (V,), of which -inf is never drawn.

    Raises RecipeError for logits that are not finite.
    """
    highest = float(logits.max())  # NaN if any is
    if not math.isfinite(highest):
        raise RecipeError(
            "model",
            f"the logits of the next token are not finite: {highest} is the highest.",
            "Its weights may have diverged: --step N takes those of an earlier checkpoint.",
        )
    if drawing.temperature == 0:
        return int(logits.argmax())
    if 0 < drawing.top_k < len(logits):
        least = logits.topk(drawing.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    differences = logits.double() - highest  # the highest stays 0, however small the temperature
    shares = (differences / drawing.temperature).softmax(0).float()
    return int(torch.multinomial(shares, 1, generator=generator))
