"""watched_calls: what forward does while Python runs it, and what it may not do.

Each call of forward is written down: the calls of torch with all that are no tensors, and the
globals and closed-over names that the user's functions read.  Calls that differ depend on a state
of Python, which a graph would freeze.  Values, times, random numbers and files are refused at once.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import linecache
import os
import random
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flowrun.engine.capture.in_python.banned import (
    ASKS,
    BANNED,
    DATA_OF,
    FACTS,
    LAYER,
    OF_TENSORS,
    READERS,
    READS,
    TENSOR,
    VALUE,
    FrozenError,
    stop_gradients,
)
from flowrun.engine.capture.in_python.branches import is_caught, is_unread, value_that_goes_on
from flowrun.engine.capture.in_python.frozen import freeze, freeze_class
from flowrun.engine.capture.in_python.known_values import KnownValues
from flowrun.engine.capture.patches.forward_graph import as_captured
from flowrun.engine.capture.patches.substitutes import COUNTED, Picked, replace_attribute
from flowrun.engine.ir.user_code import called_by, is_installed, is_users, place
from flowrun.engine.torch_internals import (
    CHECKPOINT_STEPS,
    MODULE_CALL,
    DynamicOutputShapeException,
    asks_for_values,
    assert_async,
    buffers_of,
    is_traced,
    mark_parameters,
    node_meta,
    parameters_of,
    submodules_of,
    tree_leaves,
)

_PYTHON = sysconfig.get_path("stdlib") + os.sep
_OF_TORCH = ("torch/utils/checkpoint.py", "torch/nn/modules/")  # files whose calls count, too
# arguments of sum
_BY_ROW: tuple[object, ...] = (((-1,), {}), ((1,), {}), ((), {"dim": -1}), ((), {"dim": 1}))
_TABLES = ("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
_FOREIGN = ("torch.", "builtins")
_PARTS = "parts"  # in the place of an attribute: the names of all that a module holds
_UNLIKE = "forward reads other values of Python in its second call, or does something else"
Line = tuple[str, int, str]  # file, number, function


class CallWatch(TorchFunctionMode):
    """A mode in which forward is called, several times.

    root: the module whose forward is called.  names: id of a buffer -> its name.  notes: what is
    left out.  assigned: ids of buffers in whose place forward assigns another tensor.  asked: names
    of buffers by whose values Python has decided -> the frames that ask.
    """

    def __init__(self, root: nn.Module, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.known = names, KnownValues(self._note_asked)
        self.asked: dict[str, list[traceback.FrameSummary]] = {}
        forward = root.forward
        root.forward = lambda *values: self._call(forward, values)
        self.root = root.forward.__code__
        self.modules = {path: each for path, each in root.named_modules() if path}
        self.paths = {id(each): path for path, each in reversed(self.modules.items())}
        self.calls: list[list[tuple[Line, object]]] = []
        self.reads: list[dict[Line, list[object]]] = []
        self.states: list[dict[tuple[str, str], object]] = [self._state()]
        self.refused: list[FrozenError] = []
        self.notes: dict[str, None] = {}
        self.assigned: dict[int, None] = {}
        self.before = [(table, dict(table)) for table in self._tables()]
        self.tied: dict[int, list[tuple[dict[str, Any], str]]] = {}  # places of a tensor, by its id
        for table, before in self.before:
            for name, value in before.items():
                if isinstance(value, Tensor):
                    self.tied.setdefault(id(value), []).append((table, name))
        self.spent: set[int] = set()  # ids of what stands in the place of tensors of a graph
        self.within = False

    # ------------------------------------------------------------------ calls

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, functions that no graph holds are refused, in backward, too."""
        with contextlib.ExitStack() as stack:
            for owner, names, reason in BANNED:
                for name in names.split():
                    banned = self._refuse_calls(getattr(owner, name), reason or f"it calls {name}")
                    stack.enter_context(replace_attribute(owner, name, banned))
            stack.enter_context(replace_attribute(builtins, "print", self._leave_out_print))
            stack.enter_context(replace_attribute(torch, "_check_tensor_all_with", self._assert))
            once = replace_attribute(*CHECKPOINT_STEPS, lambda *_, **__: iter((None,)))
            stack.enter_context(once)  # computes nothing again in backward
            steps = {"__enter__": stop_gradients, "__exit__": torch.no_grad.__exit__}
            for name, step in steps.items():
                stack.enter_context(replace_attribute(torch.inference_mode, name, step))
            before = sys.getprofile()
            stack.callback(sys.setprofile, before)
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                node_meta().clear()
                self.states.append(self._state())  # hooks run in backward
                self._restore()

    def _call(self, forward: Callable[..., Any], values: Sequence[Tensor]) -> Any:
        """Call forward once."""
        self.calls.append([])
        self.reads.append({})
        self.within = True
        for (table, name), *others in self.tied.values():
            for other, its_name in others:  # torch gives each name a tensor of its own
                other[its_name] = table[name]
        held = [(table, dict(table)) for table in self._tables()]
        self.known.begin(
            (self.names[id(before[name])], value, before[name])
            for (_, now), (_, before) in zip(held, self.before, strict=True)
            for name, value in now.items()
            if id(before.get(name)) in self.names
        )
        try:
            mark_parameters(self.modules.values())
            with self:  # fields are detached: forward may ask for their gradients
                made = forward(*(value.detach() for value in values))
        finally:
            self.within = False
            for key in ("nn_module_stack", "stack_trace"):
                node_meta().pop(key, None)
        for (now, given), (_, before) in zip(held, self.before, strict=True):
            new = (name for name, value in given.items() if now.get(name) is not value)
            self.assigned |= {id(before[name]): None for name in new if name in before}
        self._release()
        self.states.append(self._state())
        return made

    def _tables(self) -> Iterator[dict[str, Any]]:
        """Yield the dicts in which modules hold what they hold."""
        for module in self.modules.values():
            yield from (vars(module), parameters_of(module), buffers_of(module))

    def _release(self) -> None:
        """Let no attribute hold a tensor of the graph, so that no later call can read it."""
        for module in self.modules.values():
            for name, value in vars(module).items():
                if is_traced(value):
                    spent = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    vars(module)[name] = spent
                    self.spent.add(id(spent))
                elif name not in _TABLES and any(map(is_traced, tree_leaves(value))):
                    reason = f"forward keeps tensors in `{name}`"
                    self.refused.append(FrozenError(reason, self._lines_of(name)))

    def _restore(self) -> None:
        """Give attributes that hold a tensor of the graph what they held before."""
        for table, before in self.before:
            for name, value in [*table.items()]:
                if is_traced(value) or id(value) in self.spent or name in _TABLES[2:]:
                    table.pop(name)
                    table.update({name: before[name]} if name in before else {})

    def _state(self) -> dict[tuple[str, str], object]:
        """Return what modules and their classes hold, by (module, attribute), comparable."""
        found = {("", "numpy.random"): freeze(np.random.get_state(legacy=False))}
        for path, module in self.modules.items():
            tables = (parameters_of(module), buffers_of(module), submodules_of(module))
            held: dict[str, object] = {_PARTS: sorted(itertools.chain(*tables))}
            for owner in (
                each for each in type(module).__mro__ if not each.__module__.startswith(_FOREIGN)
            ):
                held |= {key: value for key, value in vars(owner).items() if not callable(value)}
            held |= vars(module)
            found |= {(path, key): freeze(held[key]) for key in held if key not in _TABLES}
        return found

    def difference(self) -> FrozenError | None:
        """Return what depends on a state of Python: a line that does something else in a later
        call, or what the second call changes again.
        """
        if line := self._unlike_line():
            return FrozenError(_UNLIKE, [summary_at(line)])
        before, once, *later = self.states
        parts = {key: value for key, value in before.items() if key[1] in (_PARTS, "training")}
        for earlier, after in ((once, parts), *zip((once, *later), later, strict=False)):
            for path, name in (key for key in after if earlier.get(key) != after[key]):
                roots = {"": "NumPy", "model": "the model"}
                whose = roots.get(path, path.removeprefix("model."))
                reason = f"forward changes `{name}` of {whose} with every call, in Python"
                if name == _PARTS:
                    both = (tree_leaves(each.get((path, name))) for each in (after, earlier))
                    name = min({*next(both)} ^ {*next(both)})
                    reason = f"forward registers or removes `{name}` of {whose}"
                return FrozenError(reason, self._lines_of(name))
        return None

    def _unlike_line(self) -> Line | None:
        """Return a line that two calls do not have alike; None if they are equal."""
        for one, two in itertools.pairwise(self.calls):
            if one != two:
                k = next(k for k in itertools.count() if one[k : k + 1] != two[k : k + 1])
                shared = {line for line, _ in one} & {line for line, _ in two}
                lines = [line for line, _ in (*one[k : k + 1], *two[k : k + 1])]
                return min(lines, key=shared.__contains__)
        for read, again in itertools.pairwise(self.reads):
            for line in (line for line in read if line in again):
                if any(a != b for a, b in zip(read[line], again[line], strict=False)):
                    return line
        return None

    def _lines_of(self, attribute: str) -> list[traceback.FrameSummary]:
        """Return a line of a user's function that names an attribute, if one does."""
        words = "train(ing)?|eval" if attribute == "training" else re.escape(attribute)
        for file, first, function in self.reads[-1]:
            block = inspect.getblock(linecache.getlines(file)[first - 1 :])
            for number, text in enumerate(block, first):
                if re.search(rf"\.({words})\b", text):
                    return [summary_at((file, number, function))]
        return []

    def _frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        """Yield a frame and those that called it, as far as the watched forward."""
        while frame is not None and frame.f_code is not self.root:
            yield frame
            frame = frame.f_back

    # ------------------------------------------------------------------ what is called

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        func, args, kwargs = as_captured(func, args, dict(kwargs or {}))
        frame = _outer_frame()
        line = self._note_place(frame)
        name = getattr(func, "__name__", str(func))
        users = next((f for f in self._frames(frame) if is_users(f.f_code.co_filename)), frame)
        if func is Tensor.__format__ and is_unread(users):
            return ""
        if func not in FACTS:
            self.calls[-1].append((line, (name, freeze((args, kwargs)))))
        if name == "masked_select" and not kwargs and args[0].dim() == 2:
            return Picked(*args)
        made = self._run(func, args, kwargs, frame)
        if func == TENSOR.data.__get__:
            setattr(made, DATA_OF, args[0])
        if func is Tensor.sum and (args[1:], kwargs) in _BY_ROW:
            setattr(made, COUNTED, args[0])
        return made

    def _run(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> object:
        """Call a function of torch, and explain why it cannot be recorded."""
        if func in OF_TENSORS:
            return self._run_refused(func, args, kwargs, frame)
        leaves = tree_leaves((args, kwargs))
        if any(id(each) in self.spent for each in leaves):
            self._refuse("forward reads a tensor that an earlier call has kept", frame)
        if any(isinstance(each, torch.Generator) for each in leaves):
            self._refuse("it draws from a torch.Generator", frame)
        try:
            made = self.known.follow(func, args, kwargs)
        except Exception as error:
            return self._answer(error, func, args, kwargs, frame)
        if isinstance(made, Tensor) and made.layout is not torch.strided:
            self._refuse(f"it makes a tensor of layout {made.layout}", frame)
        return made

    def _answer(
        self, error: Exception, func: Any, args: Any, kwargs: Any, frame: FrameType
    ) -> object:
        """Return what a function returns that torch cannot record, if that is known."""
        shape = isinstance(error, DynamicOutputShapeException)
        asks = func is Tensor.__bool__ or asks_for_values(error)
        if (shape or asks) and (answer := self.known.ask(func, args, kwargs)) is not None:
            return answer
        if asks and (known := self.known.numbers(args, kwargs)):
            return func(*known[0], **known[1])
        if isinstance(error, DynamicOutputShapeException):
            self._refuse(f"the shape of its result depends on values ({error.func})", frame)
        of_torch = frame.f_code.co_name == "__bool__"  # that of tensors which stand in
        if of_torch or func is Tensor.__bool__:
            return self._decide(args[0], frame.f_back if of_torch and frame.f_back else frame)
        if asks:
            self._refuse(VALUE, frame)
        raise error

    def _run_refused(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> object:
        """Call one of OF_TENSORS where it asks for a known value, gives a tensor its own data, or
        reads the gradient of what has none.
        """
        if func == TENSOR.data.__set__ and getattr(args[1], DATA_OF, None) is args[0]:
            return None
        if func == TENSOR.grad.__get__ and not args[0].requires_grad:
            return None
        answer = self.known.ask(func, args, kwargs) if func in ASKS else None
        return self._refuse(OF_TENSORS[func], frame) if answer is None else answer

    def _note_asked(self, names: frozenset[str]) -> None:
        for name in names - self.asked.keys():
            self.asked[name] = self._users_frames(inspect.currentframe())

    def _users_frames(self, frame: FrameType | None) -> list[traceback.FrameSummary]:
        frames = (each for each in self._frames(frame) if is_users(each.f_code.co_filename))
        return [_summary(each) for each in reversed([*frames])]

    def _decide(self, condition: Tensor, frame: FrameType) -> bool:
        """Return the truth of a condition with which forward does not raise, and assert it."""
        value = value_that_goes_on(frame)
        users = [each for each in self._frames(frame) if is_users(each.f_code.co_filename)]
        if value is None or any(map(is_caught, users)):
            self._refuse(VALUE, frame)
        where = place(map(_summary, reversed(users)))
        assert_async(condition if value else condition == 0, f"a check raises: {where}")
        return bool(value)

    def _assert(self, _error: object, condition: Tensor, _message: object = None) -> None:
        where = place([_summary(_caller(_outer_frame()))])
        assert_async(condition.all(), f"a check raises: {where}")

    def _note_place(self, frame: FrameType) -> Line:
        """Give torch the module and the line of the nodes that follow; return the line."""
        line, path = ("", 0, ""), ""
        for each in self._frames(frame):
            code = each.f_code
            if not line[1] and is_users(code.co_filename):
                line = (code.co_filename, each.f_lineno, code.co_name)
            if not path and code is MODULE_CALL:
                path = self.paths.get(id(each.f_locals["self"]), "")
            if path and line[1]:
                break
        meta = node_meta()
        meta["stack_trace"] = (
            f'  File "{line[0]}", line {line[1]}, in {line[2]}\n' if line[1] else ""
        )
        meta["nn_module_stack"] = {path: (path, nn.Module)} if path else {}
        return line

    # ------------------------------------------------------------------ what is refused

    def _refuse(self, reason: str, frame: FrameType) -> NoReturn:
        raise self._record(reason, frame)

    def _record(self, reason: str, frame: FrameType) -> FrozenError:
        """Keep an error, which forward might catch, to be raised in the end."""
        error = FrozenError(reason, self._users_frames(frame))
        self.refused.append(error)
        return error

    def _refuse_calls(self, function: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = _caller(_outer_frame())
            file = caller.f_code.co_filename
            of_library = is_users(file) and is_installed(file)
            if reason == LAYER and of_library and any(map(is_traced, args[1:2])):
                return args[1].detach()  # peft's weight, transposed: nobody trains it
            if self.calls and (is_users(file) or any(each in file for each in _OF_TORCH)):
                self._refuse(reason, caller)
            return function(*args, **kwargs)

        return call

    def _leave_out_print(self, *args: object, **how: object) -> None:
        where = place([_summary(_caller(_outer_frame()))])
        self.notes[f"print is left out{f' ({where})' if where else ''}"] = None

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._note_reads(frame)
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            draws = isinstance(owner, random.Random)
            reads = isinstance(owner, ModuleType) and called.__name__ in READS
            if draws or reads or id(owner) in READERS:
                caller = _caller(frame)
                file = caller.f_code.co_filename
                if is_users(file) and (draws or not is_installed(file)):
                    inner = called_by(caller, frame)
                    name = inner or "random." * draws + called.__name__
                    self._record(f"it calls {name}, which does not compute with tensors", caller)

    def _note_reads(self, frame: FrameType) -> None:
        """Write down the arguments, globals and closed-over names of a user's function."""
        code, names = frame.f_code, frame.f_globals
        if self.within and _is_own(code):
            line = (code.co_filename, code.co_firstlineno, code.co_name)
            known = {name: names[name] for name in code.co_names if name in names}
            read = [(k, freeze_class(value)) for k, value in (known | frame.f_locals).items()]
            self.reads[-1].setdefault(line, []).append(read)


@lru_cache(maxsize=4096)
def _is_own(code: CodeType) -> bool:
    """Return whether a function is the user's; a generator is called when it is deleted, too."""
    file, generates = code.co_filename, bool(code.co_flags & inspect.CO_GENERATOR)
    return is_users(file) and not is_installed(file) and not generates


def _outer_frame() -> FrameType:
    """Return the frame that called the caller of this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return frame.f_back.f_back


def _caller(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not of Python's own library."""
    file = frame.f_code.co_filename
    of_python = file.startswith(_PYTHON) and not is_installed(file)
    return _caller(frame.f_back) if of_python and frame.f_back else frame


def _summary(frame: FrameType) -> traceback.FrameSummary:
    code = frame.f_code
    return summary_at((code.co_filename, frame.f_lineno, code.co_name))


def summary_at(line: Line) -> traceback.FrameSummary:
    return traceback.FrameSummary(*line, line=linecache.getline(line[0], line[1]).strip())
