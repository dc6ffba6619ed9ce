import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.text.codec import ByteCodec
from flowrun.launcher.text.generate import Continuation, Drawing, draw, generate, write_all
from flowrun.launcher.text.text_model import TextModel, text_model
from flowrun.models.gpt import GPT
from flowrun.models.moe import MixtureGPT

LIKELIEST = Drawing(tokens=5, temperature=0)


class NextLetter(nn.Module):
    """The letter after the last one is the likeliest; it remembers how much it has read."""

    def __init__(self, vocabulary: int = 256) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.read: list[int] = []

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.read.append(tokens_BT.shape[1])
        return nn.functional.one_hot((tokens_BT + 1) % 256, self.vocabulary).float()


def made(module: nn.Module, window: int = 3) -> TextModel:
    return text_model(module, {"tokens_BT": "tokens"}, window, "Model")


def written(model: TextModel, prompt: bytes, how: Drawing, codec: Any = ByteCodec) -> str:
    return "".join(generate(model, Continuation(codec(), prompt, how)))


def test_each_token_is_fed_back() -> None:
    assert written(made(NextLetter()), b"xa", LIKELIEST) == "bcdef"


def test_the_last_window_is_read() -> None:
    module = NextLetter()
    written(made(module), b"ab", LIKELIEST)
    assert module.read == [2, 3, 3, 3, 3]


def test_a_text_ends_where_the_codec_says() -> None:
    class Ends(ByteCodec):
        ends = frozenset(b"d")

    assert written(made(NextLetter()), b"a", LIKELIEST, Ends) == "bc"


def test_ids_without_text_are_not_drawn() -> None:
    module = NextLetter(vocabulary=257)
    logits = torch.zeros(257)
    logits[256] = 100
    module.forward = lambda tokens_BT: logits.expand(*tokens_BT.shape, 257)  # type: ignore[method-assign]
    assert len(written(made(module), b"a", Drawing(tokens=3))) <= 3


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    drawing, generator = Drawing(temperature=temperature), torch.Generator()
    with pytest.raises(RecipeError, match=r"logits of the next token are not finite.*\n.*--step N"):
        draw(torch.full((3,), value), drawing, generator)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-9])
def test_the_smallest_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([1.0, -torch.inf, 4.0, -3e38])
    assert draw(logits, Drawing(temperature=temperature), torch.Generator()) == 2


@pytest.mark.parametrize(
    "given", [{"seed": 10**20}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.01}]
)
def test_numbers_that_draw_nothing_are_refused(given: dict[str, Any]) -> None:
    [(key, value)] = given.items()
    with pytest.raises(RecipeError) as caught:
        Drawing(**given)
    assert caught.value.where == f"--{key.replace('_', '-')} {value}"


def test_more_ids_than_logits_are_refused() -> None:
    class Few(nn.Module):
        def forward(self, tokens_BT: Tensor) -> Tensor:
            return torch.zeros(*tokens_BT.shape, 8)

    with pytest.raises(RecipeError, match="has 256 ids, and Model logits of 8"):
        written(made(Few()), b"a", LIKELIEST)


def test_a_seed_repeats_a_text() -> None:
    texts = [written(made(NextLetter()), b"a", Drawing(tokens=20, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_only_the_likeliest_are_drawn_from() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 2.9, 1.0]), torch.Generator().manual_seed(0)
    found = {draw(logits, Drawing(top_k=2), generator) for _ in range(100)}
    assert found == {1, 2}


def test_a_temperature_flattens() -> None:
    logits, generator = torch.tensor([0.0, 2.0]), torch.Generator().manual_seed(0)
    counts = [
        sum(draw(logits, Drawing(temperature=heat), generator) for _ in range(300))
        for heat in (0.2, 1.0, 50.0)
    ]
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize(("top_p", "expected"), [(0.4, {1}), (0.6, {1, 2}), (0.91, {1, 2, 3})])
def test_the_likeliest_that_have_a_sum_are_drawn_from(top_p: float, expected: set[int]) -> None:
    logits, generator = torch.tensor([0.01, 0.5, 0.4, 0.09]).log(), torch.Generator().manual_seed(0)
    drawing = Drawing(temperature=1, top_p=top_p)
    assert {draw(logits, drawing, generator) for _ in range(200)} == expected


@pytest.mark.parametrize(
    ("stops", "text", "why"),
    [
        (("de",), "bc", "stop"),
        (("zz", "ef", "cdx", "de"), "bc", "stop"),
        (("fgh",), "bcdef", "tokens"),  # it has begun, and is given as it is
        (("a",), "bcdef", "tokens"),  # of the prompt
        ((), "bcdef", "tokens"),
    ],
)
def test_a_text_ends_before_a_stop_text(stops: tuple[str, ...], text: str, why: str) -> None:
    drawing = Drawing(tokens=5, temperature=0, stops=stops)
    written = Continuation(ByteCodec(), b"a", drawing)
    for _ in write_all(made(NextLetter()), [written]):
        assert text.startswith(written.text)
    assert (written.text, written.stopped_by) == (text, why)
    pieces = [*generate(made(NextLetter()), Continuation(ByteCodec(), b"a", drawing))]
    assert "".join(pieces) == text


MODELS = {
    "keys kept": lambda: GPT(256, 24, 2, 2, 16),
    "whole forwards": lambda: MixtureGPT(256, 24, 2, 2, 16, experts=4),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("drawing", [{"temperature": 0}, {"seed": 3, "top_p": 0.9}, {"top_k": 9}])
def test_a_text_is_that_of_its_prompt_alone(
    model: str, drawing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrun.launcher.text.generate._MOST_TEXTS", 4)
    torch.manual_seed(0)
    module, how = MODELS[model](), Drawing(tokens=12, stops=("\x7f",), **drawing)
    prompts = [b"import os", b"a", b"def", b"class Fox is a very long", b"x = ", b"b", b"c", b"d"]
    texts = [Continuation(ByteCodec(), prompt, how) for prompt in prompts]
    ended = [*write_all(made(module, 24), texts)]
    assert ended == sorted(ended) and ended[-1] == len(prompts)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.text == written(made(module, 24), prompt, how)


@pytest.mark.parametrize(("kept", "read"), [(False, [2, 3, 4] * 3), (True, [2, 1, 1])])
def test_texts_whose_logits_would_fill_the_memory_are_written_apart(
    kept: bool, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lengths = made(GPT(256, 24, 1, 2, 16), 24), list[int]()
    model.cache = model.cache if kept else ""
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["tokens_BT"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr("flowrun.launcher.text.generate._MOST_LOGITS", 256 * 3 * 2)
    drawing = Drawing(tokens=3, temperature=0)
    list(write_all(model, [Continuation(ByteCodec(), b"ab", drawing) for _ in range(3)]))
    assert lengths == read
