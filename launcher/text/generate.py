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

_MOST_TEXTS = 16  # at once
_MOST_LOGITS = 1 << 28  # of a forward over them: 1 GiB
_SEEDS = range(-(1 << 63), 1 << 64)  # that torch takes


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A drawing says how many tokens are drawn, and how.

    tokens: the most.  temperature: divides the logits; 0: always the likeliest token.  top_k: the
    number of the likeliest that are drawn from; 0: all.  top_p: of these, the likeliest whose
    probabilities sum to it (nucleus sampling, arXiv 1904.09751).  seed: of the random numbers of
    each text.  stops: a text ends before any of them.  Raises PlacedError for a value that no text
    can be drawn by.
    """

    tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            problem = "a temperature is 0 or a number above 0."
            raise CommandLineError(f"--temperature {self.temperature}", problem)
        if not 0 < self.top_p <= 1:
            problem = "a sum of probabilities is above 0 and at most 1."
            raise CommandLineError(f"--top-p {self.top_p}", problem, "--top-p 1 keeps all tokens.")
        if self.seed not in _SEEDS:
            problem = "torch takes no such seed: it has more than 64 bits."
            raise CommandLineError(f"--seed {self.seed}", problem)
        if not all(self.stops):
            raise CommandLineError('--stop ""', "an empty text would end every text at once.")


class Continuation:
    """A continuation is the text after a prompt, while it is written.

    ids: of the prompt and the text.  text: the part that is certain; what may begin a stop text is
    held back.  stopped_by: `end` (an id that ends a text), `stop` (a text of `drawing.stops`) or
    `tokens` (`drawing.tokens` are drawn); empty before its end.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], drawing: Drawing) -> None:
        self.codec, self.drawing, self.ids = codec, drawing, [*prompt]
        self.text = self.stopped_by = self._whole = ""
        self._decode = codec.decoder(self.ids[:])
        self._generator = torch.Generator().manual_seed(drawing.seed)
        self._last = len(self.ids) + drawing.tokens

    def add(self, logits: Tensor) -> None:
        """Draw the next token from logits (V,); after the end of the text repeat the last one."""
        if self.stopped_by:
            self.ids.append(self.ids[-1])
            return
        token = draw(logits, self.drawing, self._generator)
        self.ids.append(token)
        if not (ends := token in self.codec.ends):
            self._whole += self._decode(token)
        stops = self.drawing.stops
        places = [self._whole.find(stop, len(self.text)) for stop in stops]
        if found := [place for place in places if place >= 0]:
            self.text, self.stopped_by = self._whole[: min(found)], "stop"
        elif ends or len(self.ids) == self._last:
            self.text, self.stopped_by = self._whole, "end" if ends else "tokens"
        else:
            starts = (stop[:n] for stop in stops for n in range(len(stop)))
            held = max((len(each) for each in starts if self._whole.endswith(each)), default=0)
            self.text = self._whole[: len(self._whole) - held]


def write_together(model: TextModel, texts: Sequence[Continuation]) -> Iterator[None]:
    """Write texts at once, until all have ended; yield after each token.

    Longer prompts are read as far as the shortest, and then token by token while the others are
    written: no sample has padding, so each text is that of its prompt alone but for rounding.
    Raises RecipeError where the codec is not that of the model's ids.
    """
    length = min(len(text.ids) for text in texts)
    while not all(text.stopped_by for text in texts):
        logits, size = model.next_logits([text.ids[:length] for text in texts]), texts[0].codec.size
        if logits.shape[1] < size:
            raise RecipeError(
                KEY,
                f"the tokenizer has {size} ids, and {model.name} logits of {logits.shape[1]}.",
                "Give the tokenizer that its data was made with: --tokenizer FOLDER.",
            )
        for text, each in zip(texts, logits, strict=True):
            if len(text.ids) == length:
                text.add(each[:size])
        length += 1
        yield


def write_all(model: TextModel, texts: Sequence[Continuation]) -> Iterator[int]:
    """Write texts, of prompts of like lengths at once; yield after each token how many ended."""
    waiting, ended = sorted(texts, key=lambda text: len(text.ids)), 0
    while waiting:
        shortest, tokens = len(waiting[0].ids), texts[0].drawing.tokens
        read = min(model.window, shortest + 2 * tokens)  # the most tokens of a text at once
        read = shortest if model.cache and read < model.window else read
        most = min(max(_MOST_LOGITS // (texts[0].codec.size * read), 1), _MOST_TEXTS)
        group = [each for each in waiting if len(each.ids) <= shortest + tokens][:most]
        waiting = waiting[len(group) :]
        for _ in write_together(model, group):
            yield ended + sum(bool(text.stopped_by) for text in group)
        ended += len(group)


def generate(model: TextModel, written: Continuation) -> Iterator[str]:
    """Yield the pieces of a text after a prompt of at least one id, as they are made.

    Raises RecipeError where the codec is not that of the model's ids.
    """
    shown = 0
    for _ in write_together(model, [written]):
        yield written.text[shown:]
        shown = len(written.text)


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
    if drawing.top_p < 1:
        likeliest, tokens = shares.sort(descending=True, stable=True)
        shares[tokens[likeliest.cumsum(0) - likeliest >= drawing.top_p]] = 0
    return int(torch.multinomial(shares, 1, generator=generator))
