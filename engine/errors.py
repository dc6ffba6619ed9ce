"""The error tree.  Every error says where, what the facts are, and what to write instead.

    FlowrunError
    ├── RecipeError  a key or value of the recipe is wrong; the launcher finds its file and line
    ├── SbpError     no legal signature or boxing exists; `where` is an op and its module
    ├── PlanError    the plan cannot run (deadlock); `where` is an actor or a register
    └── RunError     a rank failed while running; `where` is a rank and an actor

The engine knows only dotted keys (`sbp.blocks.*.attn`); places in files are the launcher's business
(launcher/recipe/locate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRACEBACK = "FLOWRUN_TRACEBACK"  # environment variable: 1 shows where in flowrun an error came from


class FlowrunError(Exception):
    """An error for the user: shown without a traceback.

    where: what is wrong, as a dotted recipe key, an op with its module, an actor, or a rank.
    problem: the facts, in the reader's words.
    instead: what to write or do instead; may be empty.
    """

    def __init__(self, where: str, problem: str, instead: str = "") -> None:
        super().__init__(where, problem, instead)
        self.where = where
        self.problem = problem
        self.instead = instead

    def __str__(self) -> str:
        lines = [self.where, *self.problem.splitlines(), *self.instead.splitlines()]
        return "\n  ".join(lines)


class ArgumentError(ValueError):
    """An object cannot be made from one of its arguments, which the launcher shows at its key.

    Data sets raise it, which the recipe makes by `_target_`; they know no key but their own.
    argument: the name of the parameter.  problem, instead: see FlowrunError.
    """

    def __init__(self, argument: str, problem: str, instead: str = "") -> None:
        super().__init__(argument, problem, instead)
        self.argument = argument
        self.problem = problem
        self.instead = instead

    def __str__(self) -> str:
        return f"{self.argument}: {self.problem} {self.instead}".rstrip()


class RecipeError(FlowrunError):
    """A key or a value of the recipe is wrong."""


class SbpError(FlowrunError):
    """No legal signature, or no boxing, exists for what the recipe asks."""


class PlanError(FlowrunError):
    """The compiled plan cannot run."""


class RunError(FlowrunError):
    """A rank failed while running."""


@contextmanager
def refuse_as(refuse: Callable[[Exception], FlowrunError]) -> Iterator[None]:
    """Raise refuse(error) for what foreign code inside raises: a user's, or that of a library whose
    errors have no common class.  A FlowrunError passes.  The panic of a library in Rust, which is
    no Exception, counts as one.
    """
    try:
        yield
    except FlowrunError:
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise refuse(RuntimeError(f"a panic: {error}")) from error
        if not isinstance(error, Exception):
            raise
        raise refuse(error) from error
