import torch

from flowrun.models.llama import Llama


def tiny(key_heads: int) -> Llama:
    torch.manual_seed(0)
    return Llama(vocabulary=32, depth=2, heads=4, key_heads=key_heads, width=32, inner=48)


def test_heads_of_keys_that_are_shared_are_heads_that_are_equal() -> None:
    shared, apart = tiny(2), tiny(4)
    state = shared.state_dict()
    for name in state:
        if name.endswith(("attn.k.weight", "attn.v.weight")):
            heads = state[name].view(2, 8, 32).repeat_interleave(2, dim=0)
            state[name] = heads.reshape(32, 32)
    apart.load_state_dict(state)
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(shared(tokens), apart(tokens))
