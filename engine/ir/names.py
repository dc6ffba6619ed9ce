"""names: what the tensors of a graph are called, so that no two have one name.

A model calls its parameters, buffers and fields as it likes ("mean", "grad/a", "x'"), torch calls
its nodes by words and numbers ("mean_1"), and passes put something before or after a name ("x'",
"x:S(1)", "x/before", "mm_sum", "mm.0", "grad/a.weight").  So

    a variable    its name, as a rule: two dots or more, or one with a word after it.  Any other
                  has a dot in front, and so has what is in a module called "batch"
    a field       "batch." and a name without a dot
    a node        torch's name, without a dot; with ~ in front if a pass has that word for itself

and signs that passes use are spelt as numbers in names of the user's ("x%27").
"""

from __future__ import annotations

import re

ROWS = "rows/"  # prefix of a result that is rows of samples, of the whole step, and no mean
_PLAIN = re.compile(r"[^.]+\.(?:[^.\d][^.]*|[^.]*\..*)", re.DOTALL)
_SIGN = re.compile(r"[^\w.-]")
_BATCH = "batch."
# tensors that passes make by these names alone, or with more after them
_TAKEN = frozenset(
    (
        *("tangent", "loss", "batch", "grad", "skip", "unscale", "update", "coefficient"),
        *("sumsq", "scaled", "clip", "next", "unscaled"),
    )
)


def tensor_of_variable(name: str) -> str:
    """The tensor of a parameter or buffer."""
    spelt = _spelt(name)
    plain = _PLAIN.fullmatch(spelt) and not spelt.startswith(_BATCH)
    return spelt if plain else f".{spelt}"


def tensor_of_field(field: str) -> str:
    """The tensor of a field of the batch."""
    return _BATCH + _spelt(field).replace(".", "%2e")


def tensor_of_node(name: str) -> str:
    """Return the name of the tensor that a node of torch's graph makes, and of its op."""
    return f"~{name}" if name.partition("_")[0] in _TAKEN else name


def _spelt(name: str) -> str:
    return _SIGN.sub(lambda sign: f"%{ord(sign[0]):x}", name)
