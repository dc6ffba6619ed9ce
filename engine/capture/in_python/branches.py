"""branches: an `if` on the value of a tensor, one side of which does nothing but raise.

Read from the bytecode of the frame that asks: `if (x < 0).any(): raise`, `assert`, the checks of
torch.distributions.  The other side is taken, and the condition becomes an assert.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import linecache
from functools import lru_cache
from types import CodeType, FrameType

from flowrun.engine.ir.user_code import is_installed

_ENDS = ("RETURN", "YIELD", "SEND", "FOR_ITER", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR")


def value_that_goes_on(frame: FrameType) -> bool | None:
    """Return the truth of a condition with which a frame does not raise; None if neither
    value raises, or if an `except` further out may catch what it raises.
    """
    called = frame.f_back if _returns_truth(frame) else None
    frame = called or frame
    code = _Bytecode.of(frame.f_code)
    jump = code.number_at(frame.f_lasti) + (called is not None)
    jump += code.steps[jump].opname == "TO_BOOL"
    step = code.steps[jump]
    if "POP_JUMP" not in step.opname or not step.opname.endswith(("_TRUE", "_FALSE")):
        return None
    jumps = step.opname.endswith("_TRUE")
    sides = {jumps: code.at[step.argval], not jumps: jump + 1}
    raising = [value for value, k in sides.items() if code.only_raises(k)]
    return None if len(raising) != 1 else not raising[0]


def is_caught(frame: FrameType) -> bool:
    """Return whether the line that a frame runs may stand within try and except, or suppress."""
    if "suppress" in frame.f_code.co_names:
        return True
    return _Bytecode.of(frame.f_code).is_caught(frame.f_lasti)


def _returns_truth(frame: FrameType) -> bool:
    """Return whether `return bool(…)` is all of its line, as in a check of torch.distributions."""
    match _line_of(frame):
        case ast.Module(body=[ast.Return(value=ast.Call(func=ast.Name(id="bool")))]):
            return True
    return False


def _line_of(frame: FrameType) -> ast.Module:
    """Return the line that a frame runs, parsed; empty where it is a part of a statement."""
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.parse(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
    return ast.Module(body=[], type_ignores=[])


def is_printed(frame: FrameType) -> bool:
    """Return whether a frame formats text for print alone: `print(f"{x}")` is all of its line."""
    line = _line_of(frame)
    with contextlib.suppress(ValueError):  # it calls nothing
        whole, *inner = [node for node in ast.walk(line) if isinstance(node, ast.Call)]
        alone = len(line.body) == 1 and isinstance(line.body[0], ast.Expr)
        prints = alone and isinstance(whole.func, ast.Name) and whole.func.id == "print"
        texts = (node for call in inner for node in ast.walk(call))
        return prints and not any(isinstance(node, ast.JoinedStr) for node in texts)
    return False


def is_unread(frame: FrameType) -> bool:
    """Return whether text that a frame formats is for people alone: what print shows, and, in a
    library, what a call takes that returns nothing to it (a check's message, or a log's).
    """
    code, here = frame.f_code, frame.f_lineno
    return is_printed(frame) or (
        is_installed(code.co_filename)
        and any(
            isinstance(node, ast.Expr) and node.lineno <= here <= (node.end_lineno or 0)
            for node in _nodes_of(code.co_filename)
        )
    )


@lru_cache(maxsize=16)
def _nodes_of(file: str) -> list[ast.AST]:
    """Return all that a file says, parsed; nothing where it cannot be read."""
    with contextlib.suppress(SyntaxError, ValueError):
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    return []


class _Bytecode:
    """The instructions of a function.  at: offset -> number of the instruction."""

    def __init__(self, code: CodeType) -> None:
        read = dis.Bytecode(code)
        self.steps, self.entries = [*read], vars(read)["exception_entries"]
        self.at = {step.offset: k for k, step in enumerate(self.steps)}

    @staticmethod
    @lru_cache(maxsize=256)
    def of(code: CodeType) -> _Bytecode:
        return _Bytecode(code)

    def number_at(self, offset: int) -> int:
        """Return the number of the instruction at an offset; calls end at that of their caches."""
        return self.at[max(each for each in self.at if each <= offset)]

    def only_raises(self, k: int) -> bool:
        """Return whether all ways from instruction k raise, and change nothing but local names."""
        while True:
            step = self.steps[k]
            if step.opname == "RAISE_VARARGS":
                return not self.is_caught(step.offset)
            if step.opname.startswith(_ENDS) or "BACKWARD" in step.opname:
                return False
            if "JUMP" in step.opname:
                there = self.at[step.argval]
                if "_IF_" not in step.opname:
                    k = there
                    continue
                if not self.only_raises(there):
                    return False
            k += 1

    def is_caught(self, offset: int) -> bool:
        handlers = (entry.target for entry in self.entries if entry.start <= offset < entry.end)
        return any(map(self._catches, handlers))

    def _catches(self, target: int) -> bool:
        """Return False for `with` and `finally`, which raise again."""
        for step in self.steps[self.at[target] :]:
            if step.opname in ("CHECK_EXC_MATCH", "POP_EXCEPT"):
                return True
            if step.opname in ("WITH_EXCEPT_START", "RERAISE"):
                return False
        return False
