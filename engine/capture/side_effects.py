"""side_effects: the Python objects that forward changes, as Dynamo records them while it traces.

Dynamo tracks every attribute, list, dict, set, global, closure and iterator that traced code writes
to.  The captured graph leaves these writes out, so they must be known: a buffer that forward
assigns becomes an output of the graph, and all others are examined when the module is called twice
(engine/capture/check).

Relied upon of torch (tests/engine/capture/test_side_effects.py):
`SideEffects.codegen_update_mutated` is called once all is traced; `_get_modified_vars`,
`id_to_variable`, `keepalive`, `store_attr_mutations` and `mutation_user_stacks` give what was
modified, which object it is, and the lines that did it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from flowrun.engine.capture.patches.substitutes import replace_attribute
from flowrun.engine.ir.user_code import place
from flowrun.engine.torch_internals import modified_variables, side_effects


@dataclass(frozen=True, eq=False, slots=True)
class Effect:
    """An object that forward writes to.

    owner: the object: a module, a list, a cell of a closure …
    source: Dynamo's name of it, a Python expression.
    attributes: names that are set; none if the content of the object changes.
    place: the user's line, or "".
    """

    owner: object
    source: str
    attributes: tuple[str, ...]
    place: str

    def describe(self, attribute: str = "") -> str:
        """Return words for what changes: "`steps` of module blocks.0"."""
        path = _path(self.source)
        if isinstance(self.owner, nn.Module):
            return f"`{attribute}` of {describe_module(path)}"
        if self.source.startswith("G["):
            what = ".".join(part for part in (path, attribute) if part)
            return f"the global `{what}`"
        if path.endswith(".__closure__") or "__closure__" in path:
            return f"a variable that {path.partition('.__closure__')[0] or 'forward'} closes over"
        owner, _, last = path.rpartition(".")
        what = f"{last}.{attribute}" if attribute else last
        return f"`{what}` of {describe_module(owner)}"


def describe_module(path: str) -> str:
    """Return words for the module at a dotted path of the model."""
    return f"module {path}" if path else "the model"


_ITEM = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def _path(source: str) -> str:
    """Return Dynamo's expression as a dotted path from the model."""
    dotted = _ITEM.sub(r".\1", source.replace("._modules", "").replace("._buffers", ""))
    dotted = re.sub(r"^(L\.self|G\.[^.]*)\.?", "", dotted.replace("..", "."))
    return re.sub(r"^model\.?", "", dotted)


@contextmanager
def record_effects() -> Iterator[list[Effect]]:
    """Yield a list that is filled with the effects of forward when Dynamo has traced it."""
    effects: list[Effect] = []
    owner = side_effects()
    original = owner.codegen_update_mutated

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        effects[:] = _effects(self)
        original(self, *args, **kwargs)

    with replace_attribute(owner, "codegen_update_mutated", record):
        yield effects


def _effects(dynamos: Any) -> Iterator[Effect]:
    alive = {id(each): each for each in dynamos.keepalive}
    known = dynamos.id_to_variable.items()
    owners = {id(variable): alive[number] for number, variable in known if number in alive}
    stacks: Mapping[object, Any] = getattr(dynamos, "mutation_user_stacks", {})
    for variable in modified_variables(dynamos):
        if id(variable) in owners and variable.source is not None:
            frames = [frame for stack in stacks.get(variable, ()) for frame in stack]
            attributes = tuple(map(str, dynamos.store_attr_mutations.get(variable, {})))
            owner, name = owners[id(variable)], variable.source.name
            yield Effect(owner, name() if callable(name) else name, attributes, place(frames))
