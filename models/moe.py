"""A GPT in which every other block is a mixture of experts.  No ranks, no layouts.

Tokens are routed within their group, and a sample is a group (GShard, Lepikhin et al. 2020): each
expert has the same number of slots for each group.  So the result of a token does not depend on
other samples, and groups can live on different ranks.  Routing is dense: one product puts tokens
into slots, another brings them back.  Without `room` experts take all tokens that choose them, and
no token is left out (MegaBlocks, Gale et al. 2022).

Shapes in names, in addition to those of gpt.py (B samples, T tokens, D width): E experts, K choices
of a token, C slots that an expert has for a sample, S = E x C slots, F width inside an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.ops.nn.expert_op import mix_experts
from flowrun.models.gpt import Attention, Block, Embed, FeedForward


class Routed(NamedTuple):
    """The output of a mixture.

    logits: (B, T, V).  balance: imbalance of the experts, the mean over blocks with experts; 1 if
    all are used alike.
    """

    logits: Tensor
    balance: Tensor


class Experts(nn.Module):
    """A stack of feed-forward layers, one an expert: (E, N, D) -> (E, N, D)."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x_END: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x_END, self.up)), self.down)


class DroplessExperts(Experts):
    """Experts that take what chooses them: (N, D), (N, K) numbers, (N, K) weights -> (N, D)."""

    def forward(self, x_ND: Tensor, expert_NK: Tensor, share_NK: Tensor) -> Tensor:  # type: ignore[override]
        return mix_experts(x_ND, expert_NK, share_NK, self.up, self.down, act="gelu")


class DroplessRouter(nn.Module):
    """Tokens (B, T, D) -> numbers (B, T, K) and weights (B, T, K) of their experts, the balance.

    chosen: K.  speed: by how much the bias of an expert falls with a micro-batch in which it is
    chosen more often than the mean, or else rises; the bias counts in the choice alone, not in the
    weights (Wang et al., arXiv 2408.15664).
    """

    def __init__(self, width: int, experts: int, chosen: int, speed: float = 0.0) -> None:
        super().__init__()
        self.experts, self.chosen, self.speed = experts, chosen, speed
        self.score = nn.Linear(width, experts, bias=False)
        if speed:
            self.bias: Tensor = nn.Buffer(torch.zeros(experts))

    def choose(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and numbers of the experts of each token, and how likely each was."""
        likely_BTE = self.score(x_BTD).float().softmax(-1)
        if self.speed:
            expert_BTK = (likely_BTE + self.bias).topk(self.chosen).indices
            share_BTK = likely_BTE.gather(-1, expert_BTK)
        else:
            share_BTK, expert_BTK = likely_BTE.topk(self.chosen)
        if self.chosen > 1:  # for one expert it would always be 1 (Fedus et al. 2021 keep it too)
            share_BTK = share_BTK / share_BTK.sum(-1, keepdim=True)
        return share_BTK, expert_BTK, likely_BTE

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share_BTK, expert_BTK, likely_BTE = self.choose(x_BTD)
        hits_BTKE = expert_BTK.unsqueeze(-1) == torch.arange(self.experts, device=x_BTD.device)
        if self.speed and self.training:
            load_E = hits_BTKE.float().sum((0, 1, 2))
            self.bias += self.speed * torch.sign(load_E.mean() - load_E)
        return expert_BTK, share_BTK, self.balance(hits_BTKE[:, :, 0], likely_BTE)

    def balance(self, first_BTE: Tensor, likely_BTE: Tensor) -> Tensor:
        """Return E x sum over experts of (share of first choices) x (mean probability).

        This is the mean over samples (Fedus et al. 2021, equation 4).
        """
        share_BE = first_BTE.float().mean(1)
        return self.experts * (share_BE * likely_BTE.mean(1)).sum(-1).mean()


class Router(DroplessRouter):
    """Tokens (B, T, D) -> weights of the slots of each token (B, T, S), and the balance.

    chosen: K.  room: slots of an expert for a sample, as a multiple of an even share.  First
    choices are placed before second ones, earlier tokens before later ones, and a token that finds
    no slot is left out.
    """

    def __init__(self, width: int, experts: int, chosen: int, room: float) -> None:
        super().__init__(width, experts, chosen)
        self.room = room

    def slots(self, tokens: int) -> int:
        """Return C, the slots of an expert, for samples of this number of tokens."""
        return math.ceil(self.room * tokens * self.chosen / self.experts)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        T, E, K, C = x_BTD.shape[1], self.experts, self.chosen, self.slots(x_BTD.shape[1])
        numbers_E = torch.arange(E, device=x_BTD.device)
        slots_S = torch.arange(E * C, device=x_BTD.device)
        share_BTK, expert_BTK, likely_BTE = self.choose(x_BTD)
        expert_BKT = expert_BTK.transpose(1, 2)
        hits_BKTE = expert_BKT.unsqueeze(-1) == numbers_E
        queue_BNE = hits_BKTE.flatten(1, 2).long()
        place_BN = (queue_BNE.cumsum(1) * queue_BNE).sum(-1) - 1
        place_BKT = place_BN.unflatten(1, (K, T))
        slot_BKT = torch.where(place_BKT < C, expert_BKT * C + place_BKT, -1)
        taken_BKTS = (slot_BKT.unsqueeze(-1) == slots_S).to(x_BTD.dtype)
        share_BKT1 = share_BTK.to(x_BTD.dtype).transpose(1, 2).unsqueeze(-1)
        return (taken_BKTS * share_BKT1).sum(1), self.balance(hits_BKTE[:, 0], likely_BTE)


class Mixture(nn.Module):
    """(B, T, D) -> (B, T, D), and the balance: each token through the experts that it chooses."""

    def __init__(self, width: int, experts: int, chosen: int, room: float) -> None:
        super().__init__()
        self.router = Router(width, experts, chosen, room)
        self.experts = Experts(experts, width, 4 * width)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        B, D, E = x_BTD.shape[0], x_BTD.shape[2], self.router.experts
        share_BTS, balance = self.router(x_BTD)
        taken_BTS = (share_BTS > 0).to(x_BTD.dtype)
        x_BSD = torch.bmm(taken_BTS.transpose(1, 2), x_BTD)
        y_END = self.experts(x_BSD.view(B, E, -1, D).transpose(0, 1).flatten(1, 2))
        y_BSD = y_END.view(E, B, -1, D).transpose(0, 1).flatten(1, 2)
        return torch.bmm(share_BTS, y_BSD), balance


class DroplessMixture(nn.Module):
    """(B, T, D) -> (B, T, D), and the balance: no token is left out.

    shared: whether all tokens pass one more expert besides.
    """

    def __init__(self, width: int, experts: int, chosen: int, speed: float, shared: bool) -> None:
        super().__init__()
        self.router = DroplessRouter(width, experts, chosen, speed)
        self.experts = DroplessExperts(experts, width, 4 * width)
        self.shared = FeedForward(width, bias=False) if shared else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        *routes_BTK, balance = self.router(x_BTD)
        y_ND = self.experts(x_BTD.flatten(0, 1), *(route.flatten(0, 1) for route in routes_BTK))
        y_BTD = y_ND.view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), balance


class MixtureBlock(nn.Module):
    """A block of gpt.py with a mixture in place of its feed-forward."""

    def __init__(self, width: int, heads: int, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, bias=False, dropout=0.0)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = mixture()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD))
        y_BTD, balance = self.mlp(self.ln2(x_BTD))
        return x_BTD + y_BTD, balance


class MixtureGPT(nn.Module):
    """Tokens (B, T) -> Routed.

    vocabulary: number of token ids.  context: longest T.  depth: blocks, the second, fourth, … with
    experts.  width: a multiple of heads.  experts, chosen: see Router; room too, or None, and no
    token is left out.  speed, shared: see DroplessRouter and DroplessMixture.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        depth: int,
        heads: int,
        width: int,
        experts: int,
        chosen: int = 2,
        room: float | None = 1.25,
        speed: float = 0.0,
        shared: bool = False,
    ) -> None:
        super().__init__()
        if depth < 2:
            raise ValueError(f"depth {depth} is too small: the second block is the first mixture")
        if not 1 <= chosen <= experts:
            raise ValueError(f"a token cannot choose {chosen} of {experts} experts")
        if room is not None and (speed or shared):
            raise ValueError("speed and shared are of experts without capacity: write room null")

        def mixture() -> nn.Module:
            if room is None:
                return DroplessMixture(width, experts, chosen, speed, shared)
            return Mixture(width, experts, chosen, room)

        self.embed = Embed(vocabulary, context, width, dropout=0.0)
        self.blocks = nn.ModuleList(
            MixtureBlock(width, heads, mixture)
            if number % 2
            else Block(width, heads, bias=False, dropout=0.0)
            for number in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=width**-0.5)
            if name.endswith(("proj.weight", "fc2.weight", "experts.down")):
                parameter.data /= (2 * depth) ** 0.5  # layers that add to the residual, as in GPT-2

    def forward(self, tokens_BT: Tensor) -> Routed:
        x_BTD = self.embed(tokens_BT)
        balances = []
        for block in self.blocks:
            if isinstance(block, MixtureBlock):
                x_BTD, balance = block(x_BTD)
                balances.append(balance)
            else:
                x_BTD = block(x_BTD)
        return Routed(self.head(self.norm(x_BTD)), torch.stack(balances).mean())
