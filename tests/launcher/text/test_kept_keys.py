from collections.abc import Callable

import pytest
import torch
from torch import nn

from flowrun.launcher.text.text_model import text_model
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama

MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(32, 12, 2, 2, 16),
    "GPT of separate q, k, v": lambda: GPT(32, 12, 2, 2, 16, qkv_apart=True, dropout=0.1),
    "Llama": lambda: Llama(32, 2, 4, 2, 16, 24),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_kept_keys_give_the_logits_of_a_whole_forward(kind: str) -> None:
    torch.manual_seed(0)
    module = MODELS[kind]().eval()
    lengths: list[int] = []
    module.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(next(iter(kwargs.values())).shape[1]),
        with_kwargs=True,
    )
    found = text_model(module, {}, 12, kind)
    text, other = torch.randint(32, (2, 2, 14)).tolist()
    for rows, ends in ((text, (3, 4, 7, 12, 13)), (other, (2, 4)), (other[:1], (5,))):
        for end in ends:
            given = [row[:end] for row in rows]
            logits = found.next_logits(given)
            read = lengths.pop()
            whole = module(tokens_BT=torch.tensor(given)[:, -12:])[:, -1]
            lengths[-1] = read
            assert torch.allclose(logits, whole, atol=1e-5)
    assert lengths == [3, 1, 3, 5, 12, 2, 2, 5]
