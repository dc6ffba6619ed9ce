"""joint_nodes: properties of the nodes of torch's joint graph, which joint_graph.py reads.

They say which nodes are backward, which run for an effect instead of a result, which cannot be
read, and which line of the user's code each came from.

Relied upon (tests/behaviour/nets/test_custom_functions.py, test_checks.py): nodes that autograd
made have the `partitioner_tag` "is_backward", and what a user's autograd.Function computes in its
backward has none; `with_effects(token, op, *arguments)` makes a token, then what the op makes;
`stack_trace` is Python's, innermost frame last.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from flowrun.engine.errors import RecipeError
from flowrun.engine.torch_internals import HigherOrderOperator, OpOverload, schema_of

_TORCH = str(Path(torch.__file__).parent)

# a function of torch that takes functions -> what to write instead
_INSTEAD: Mapping[str, str] = {
    "cond": "Write torch.where over both results, or choose by an attribute of the module.",
    "while_loop": "Write a Python loop with a number of rounds that the module knows.",
    "scan": "Write a Python loop over the steps, or torch.cumsum and its like.",
    "associative_scan": "Write a Python loop over the steps, or torch.cumsum and its like.",
    "map": "Write a Python loop over the rows, or torch.vmap.",
    "map_impl": "Write a Python loop over the rows, or torch.vmap.",
    "flex_attention": "Write F.scaled_dot_product_attention with a mask (attn_mask).",
    "auto_functionalized": "Let the custom op return what it makes, and change no argument.",
    "auto_functionalized_v2": "Let the custom op return what it makes, and change no argument.",
    "triton_kernel_wrapper_functional": "Wrap the kernel by torch.library.custom_op.",
}


def is_tagged_backward(node: fx.Node) -> bool:
    """Return whether torch says that autograd made the node."""
    return str(node.meta.get("partitioner_tag", "")).endswith("backward")


def backward_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes of backward.

    They are those that autograd made, and all that follow the first reader of the loss's gradient,
    as ops of a user's autograd.Function carry no tag.  Nodes that results of forward depend on
    belong to forward, even if torch.autograd.grad in forward made them.
    """
    forward = _ancestors_of_forward(graph)
    backward: set[fx.Node] = set()
    begun = False
    for node in graph.nodes:
        read = (type(each.meta.get("desc")).__name__ for each in node.all_input_nodes)
        begun = begun or "TangentAOTInput" in read
        if node not in forward and (begun or is_tagged_backward(node)):
            backward.add(node)
    return frozenset(backward)


def outputs_of(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Return (a node, or None; torch's descriptor) of each result."""
    output = graph.output_node()
    return [*zip(cast("list[object]", output.args[0]), output.meta["desc"], strict=True)]


def _ancestors_of_forward(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that the results of forward, and its writes, depend on."""
    forward = ("PlainAOTOutput", "InputMutationAOTOutput")
    left = [value for value, desc in outputs_of(graph) if value and type(desc).__name__ in forward]
    ancestors = {graph.output_node()}
    while left:
        node = left.pop()
        if node not in ancestors:
            ancestors.add(node)
            left.extend(node.all_input_nodes)
    return ancestors


def drop_tokens(graph: fx.Graph) -> None:
    """Remove the tokens by which torch orders ops with effects; the ops themselves stay.

    Each such op reads the token of the one before and makes the next.
    """
    for node in list(graph.nodes):
        if str(node.target) == "with_effects":
            _drop_token(graph, node)
    output = graph.output_node()
    kept = [(value, desc) for value, desc in outputs_of(graph) if not _is_token(desc)]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in reversed(graph.nodes):
        if node.op == "placeholder" and _is_token(node.meta["desc"]):
            graph.erase_node(node)


def _is_token(desc: object) -> bool:
    return "Token" in type(desc).__name__


def _drop_token(graph: fx.Graph, node: fx.Node) -> None:
    token, target, *args = node.args
    assert isinstance(target, OpOverload)
    values = node.meta["val"][1:]
    single = len(schema_of(target).returns) < 2
    with graph.inserting_before(node):
        op = graph.call_function(target, tuple(args), node.kwargs)
    op.meta = {**node.meta, "val": values[0] if single else values}
    for user in list(node.users):
        place: Any = user.args[1]
        if place == 0:
            user.replace_all_uses_with(token)  # type: ignore[arg-type]  # a node
        elif single:
            user.replace_all_uses_with(op)
        else:
            user.args = (op, place - 1)
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def makes_tensors(node: fx.Node) -> bool:
    """Return False for an op that runs for its effect, such as an assert."""
    return node.meta.get("val") not in (None, (), [])


def check_readable(node: fx.Node) -> None:
    """Raise RecipeError for a call that is not an op of tensors."""
    if not isinstance(node.target, HigherOrderOperator):
        return
    name = str(node.target).removesuffix("_backward")
    shown = name.removesuffix("_impl")
    if name.startswith("auto_functionalized"):
        shown = f"the op {node.args[0]}, which writes into its arguments,"
    elif not name.startswith("triton"):
        shown = f"torch.{shown}"
    instead = _INSTEAD.get(name, "Write it as ops of tensors.")
    raise RecipeError("model", f"{shown} is not supported{place_of(node)}.", instead)


def place_of(node: fx.Node) -> str:
    """Return the user's line as part of a message, " (my_models.py:12)"; "" if unknown."""
    line = user_line(node)
    return f" ({line})" if line else ""


def user_line(node: fx.Node) -> str:
    """Return file:line of the innermost frame outside of torch; "" if torch recorded none."""
    return _find_user_line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=64)  # the ops of a line follow one another
def _find_user_line(stack_trace: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [f"{Path(file).name}:{line}" for file, line in frames if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def is_getitem(node: fx.Node) -> bool:
    """Return whether the node selects one of the results of an op."""
    return node.target is operator.getitem
