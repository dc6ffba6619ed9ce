"""A CallForm is an op without its sizes, so that one experiment speaks for all shapes of a kind.

Equal sizes of its tensors are one letter; so are those integers among its arguments that spell the
end of a shape (`input_size` of an upsampling's backward).  Its text is the key that found rows are
kept by: "aten.index_add.default(float[a,b], 0, int64[c], float[c,b])".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from flowrun.engine.ir.graph import Op, Ref, map_refs
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import argument_names, torch_callable
from flowrun.engine.torch_internals import schema_of

MOST_READINGS = 3  # of one op: see call_forms
# Arguments whose integers are not sizes, though they may equal some.
_NO_SIZES = ("dim", "stride", "dilation", "kernel", "pad", "shift", "group", "axis", "correction")


@dataclass(frozen=True, slots=True)
class Letter:
    """A size that may change, by name."""

    name: str

    def __str__(self) -> str:
        return self.name


FormDims = tuple["Letter | int", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A form says how an op is called, with letters in the place of sizes.

    args, kwargs: as of the op; tensors are Ref("0"), Ref("1") … in order.
    shapes, dtypes: of the tensors.
    used: for each output, whether anything reads it.
    sizes: letter -> the size in the op that the form is of; not part of the text.
    """

    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    shapes: tuple[FormDims, ...]
    dtypes: tuple[torch.dtype, ...]
    used: tuple[bool, ...]
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        words = [self._show(arg) for arg in self.args]
        words += [f"{name}={self._show(value)}" for name, value in self.kwargs]
        unused = "".join("x" if used else "_" for used in self.used)
        usual = all(self.used) and len(self.used) == num_returns(self.target)
        return f"{self.target}({', '.join(words)})" + ("" if usual else f" -> {unused}")

    def _show(self, value: object) -> str:
        if isinstance(value, Ref):
            at = int(value.name)
            dims = ",".join(map(str, self.shapes[at])) or "()"
            return f"{_kind(self.dtypes[at])}[{dims}]"
        if isinstance(value, tuple):
            return f"[{', '.join(map(self._show, value))}]"
        return str(value) if isinstance(value, (Letter, torch.dtype)) else repr(value)

    @property
    def has_positions(self) -> bool:
        """True if it reads integers."""
        return any(_kind(dtype) not in ("float", "complex", "bool") for dtype in self.dtypes)

    def op(self, sizes: Mapping[str, int]) -> Op:
        """The op with sizes in the place of letters."""
        given = map_refs(fill((self.args, self.kwargs), sizes), lambda ref: Ref(f"x{ref.name}"))
        names = tuple(f"y{k}" if used else None for k, used in enumerate(self.used))
        return Op("op", self.target, *given, outputs=names)

    def shapes_at(self, sizes: Mapping[str, int]) -> list[Shape]:
        """Shapes of the inputs."""
        return [
            tuple(sizes[n.name] if isinstance(n, Letter) else n for n in dims)
            for dims in self.shapes
        ]


def num_returns(target: str) -> int:
    """Outputs by the schema; a list of tensors counts once, however many it has."""
    return len(schema_of(torch_callable(target)).returns)


def fill(value: object, sizes: Mapping[str, int]) -> object:
    """The same nested tuples with numbers in the place of letters."""
    if isinstance(value, Letter):
        return sizes[value.name]
    if isinstance(value, tuple):
        return tuple(fill(item, sizes) for item in value)
    return value


def _kind(dtype: torch.dtype) -> str:
    """All floats are one kind, and so are all complex numbers."""
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else str(dtype).removeprefix("torch.")


def call_forms(
    op: Op,
    in_shapes: Sequence[Shape],
    in_dtypes: Sequence[torch.dtype],
    out_shapes: Sequence[Shape | None],
) -> Iterator[CallForm]:
    """Read an op in several ways, the likeliest first.

    Lists of integers that spell the end of a shape are sizes; so are all integers that equal one;
    none is.
    in_shapes, in_dtypes, out_shapes: of op.inputs and op.outputs (None where unused).
    """
    seen = set()
    for lists, singles in ((True, False), (True, True), (False, False)):
        form = _Reading(op, in_shapes, in_dtypes, out_shapes, lists, singles).form()
        if str(form) not in seen:
            seen.add(str(form))
            yield form


@dataclass
class _Reading:
    """Names sizes in the order in which the text shows them; lists, singles: what may be one."""

    op: Op
    in_shapes: Sequence[Shape]
    dtypes: Sequence[torch.dtype]
    out_shapes: Sequence[Shape | None]
    lists: bool
    singles: bool
    letters: dict[int, Letter] = field(default_factory=dict)
    shapes: list[FormDims] = field(default_factory=list)

    @property
    def known(self) -> list[Shape]:
        """Shapes of all tensors."""
        return [s for s in (*self.in_shapes, *self.out_shapes) if s]

    def form(self) -> CallForm:
        names = argument_names(self.op.target)
        given = itertools.zip_longest(self.op.args, names[: len(self.op.args)], fillvalue="")
        args = tuple(self._value(value, name) for value, name in given)
        kwargs = tuple((name, self._value(value, name)) for name, value in self.op.kwargs)
        return CallForm(
            target=self.op.target,
            args=args,
            kwargs=kwargs,
            shapes=tuple(self.shapes),
            dtypes=tuple(self.dtypes),
            used=tuple(name is not None for name in self.op.outputs),
            sizes=tuple((letter.name, size) for size, letter in self.letters.items()),
        )

    def _value(self, value: object, name: str) -> object:
        if isinstance(value, Ref):
            at = len(self.shapes)
            self.shapes.append(tuple(map(self._dim, self.in_shapes[at])))
            return Ref(str(at))
        if isinstance(value, tuple):
            if self._is_size_list(value, name):
                return tuple(map(self._dim, value))
            return tuple(self._value(item, name) for item in value)
        if self.singles and self._is_size(value, name):
            return self._dim(value)
        return value

    def _dim(self, size: int) -> Letter | int:
        """0 and 1 are shapes of their own: of what is empty, and of what is broadcast."""
        if size <= 1:
            return size
        k = len(self.letters)
        return self.letters.setdefault(size, Letter(chr(ord("a") + k) if k < 26 else f"a{k}"))

    def _is_size_list(self, value: tuple[object, ...], name: str) -> bool:
        if not self.lists or not value or any(word in name for word in _NO_SIZES):
            return False
        whole = all(type(item) is int for item in value)
        return whole and any(shape[-len(value) :] == value for shape in self.known)

    def _is_size(self, value: object, name: str) -> TypeGuard[int]:
        if type(value) is not int or any(word in name for word in _NO_SIZES):
            return False
        return value > 1 and any(value in shape for shape in self.known)
