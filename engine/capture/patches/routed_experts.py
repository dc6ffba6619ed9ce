"""routed_experts: experts of transformers' models, as one op while a model is captured.

transformers stacks the matrices of experts and marks the class of their module by a decorator,
which says how they lie (Mixtral, Qwen, OLMoE, DeepSeek-V3 and most others).  What its forward
computes is flowrun::gated_experts (ops/nn/expert_op.py): pairs of a token and an expert are sorted
within the op, so that split tokens need not be gathered.

Experts of another form stay as they are: with biases (GPT-OSS), interleaved gates, a gate or an
activation of their own.

Relied upon of transformers (tests/engine/capture/patches/test_routed_experts.py): what the
decorator sets, and the names of the parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from flowrun.engine.capture.patches.substitutes import replace_attribute
from flowrun.engine.ops.nn.expert_op import ACTIVATIONS, mix_experts

_LIBRARY = "transformers.integrations.moe"
_FORM = {  # what the decorator says of experts of the common form
    **{"has_gate": True, "has_bias": False, "has_post_expert_norm": False},
    **{"is_concatenated": True, "is_transposed": False},
}
_WEIGHTS = ("gate_up_proj", "down_proj")  # (experts, 2 x inner, width), (experts, width, inner)
_ACTIVATION = "_flowrun_activation"  # an attribute of experts, while torch traces


@contextlib.contextmanager
def replace_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, experts of the common form among the modules are one op."""
    library = vars(sys.modules.get(_LIBRARY, object))
    kinds: dict[type[nn.Module], None] = {}
    with contextlib.ExitStack() as stack:
        for module in modules:
            if _has_common_form(module, library) and (name := _activation(module)):
                vars(module)[_ACTIVATION] = name
                stack.callback(vars(module).pop, _ACTIVATION)
                kinds[type(module)] = None
        for kind in kinds:
            stack.enter_context(replace_attribute(kind, "forward", _as_one_op(kind.forward)))
        yield


def _has_common_form(module: nn.Module, library: Mapping[str, object]) -> bool:
    given, gate = vars(module), getattr(type(module), "_apply_gate", None)
    if gate is None or gate is not library.get("_default_apply_gate"):
        return False
    weights = {name for name, _ in module.named_parameters()}
    return weights == {*_WEIGHTS} and all(given.get(name) is v for name, v in _FORM.items())


def _activation(experts: nn.Module) -> str | None:
    """Return the name of the activation; None if it is none of those that the op knows."""
    probe, act = torch.linspace(-3, 3, 13), getattr(experts, "act_fn", None)
    known = (
        name for name, (f, _) in ACTIVATIONS.items() if act and torch.equal(f(probe), act(probe))
    )
    return next(known, None)


def _as_one_op(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        activation = getattr(self, _ACTIVATION, None)
        if activation is None:
            return whole(self, x, chosen, share)
        gate_up, down = (getattr(self, name).transpose(1, 2) for name in _WEIGHTS)
        made = mix_experts(x, chosen, share, *gate_up.chunk(2, -1), down, act=activation)
        return made.to(x.dtype)

    return forward
