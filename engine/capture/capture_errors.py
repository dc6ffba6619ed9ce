"""capture_errors: explain to the user why a module could not be captured.

The module is called once as plain torch calls it.  If that fails too, its error is the message;
else the message is Dynamo's, with the user's line where Dynamo stopped.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn

from flowrun.engine.capture.in_python.banned import VALUE, FrozenError
from flowrun.engine.capture.patches.tracing import silence_logs
from flowrun.engine.errors import TRACEBACK, FlowrunError, RecipeError
from flowrun.engine.ir.user_code import is_installed, is_users, place, place_of
from flowrun.engine.torch_internals import (
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    asks_for_values,
    is_of_fake_tensors,
)

# attribute of a module: name of a tensor -> its dtype before it was widened
MADE_IN = "_flowrun_made_in"
MAX_REAL_NUMBERS = 20_000_000  # elements of a model that is called with numbers, not with shapes
MODES = (
    "Set modes outside of forward: override train(), or call .eval() in it on a part that stays so."
)
# pattern of torch's message, of the line or of file names -> what to write, whosever the line is
_SWITCHES = {
    "modules/adaptive.py": "Use cross_entropy over all classes; this loss selects rows by targets.",
    "pack_padded_sequence|PackedSequence|modules/rnn.py": "Pass padded sequences to the RNN, not a "
    "PackedSequence; mask its output past each length.",
    "_compute_mask_indices": "Set apply_spec_augment to False: NumPy draws what it masks.",
    "layerdrop|skip_the_layer": "Set layerdrop to 0: capture cannot leave layers out by chance.",
    "torch_geometric/utils/loop": "Set add_self_loops=False, and let the data set's edges have the "
    "loops; edges that never change may be a buffer.",
    "performer_pytorch": "Make it with auto_check_redraw=False, which keeps its projections.",
    "_impl/adjoint": "Write odeint for odeint_adjoint: its gradients are exact, and "
    "recompute.modules saves memory.",
    "torchdiffeq": "Name a solver of fixed steps: odeint(…, method='rk4').",
    "pytorch_metric_learning": "It selects by labels. NormalizedSoftmaxLoss and SoftTripleLoss "
    "select nothing; flowrun.models has ArcFace and CosFace (insightface.MarginClasses with "
    "losses.margin_softmax) and pairs (losses.contrast).",
    "one_hot": "Give one_hot its num_classes.",
    r"or a parameter|registers or|copy\.deepcopy": "Make layers and parameters in __init__, and"
    " call them here.",
    "forward sets requires_grad": "Freeze it in __init__, or by optim.groups.<pattern>.frozen.",
    "manual_seed|fork_rng|torch.Generator": "Leave it out: train.seed seeds what every step draws.",
    "modified by an inplace": "Write into a copy (x.clone()): backward needs what was there.",
    "consumed returned": "Leave backward() out of forward: training calls it.",
}
# the same where the line is the user's own
_INSTEAD = {
    "result depends on values": "Keep the shape: torch.where(mask, a, b) for x[mask] = …, a product"
    " with the mask for sums over x[mask].",
    r"random\.|uuid": "Draw with torch (torch.rand, nn.Dropout), not with these.",
    "asks for the value": "Compute with tensors, and choose with torch.where: an `if`, .item(), "
    "int(), float() or tolist() on a tensor would be decided once, for all steps.",
    "changes `training`": MODES,
    "with every call|in its second call": "Count in a buffer (self.steps += 1), and choose with "
    "torch.where.",
    "an earlier call|keeps tensors|entirely functional graph|allow_non_fake_inputs": "Register the"
    " tensor as a buffer (self.register_buffer), and write into that.",
    "from a list": "Read it as an attribute of the module that has registered it.",
    "it calls": "Call it before training, in __init__ or in the data set, and keep what it makes: "
    "forward is captured once, for all steps.",
    "reads gradients": "Take them by torch.autograd.grad(…, create_graph=True), not by backward().",
    "replaces the .data": "Write into a buffer (self.x.copy_(…)), not into its .data.",
}
# patterns of torch's message -> in words for who did not write torch
_REASONS = {
    r"entirely functional|allow_non_fake": "forward writes into a tensor that is not a buffer",
    r"_local_scalar_dense|ata-dependent|extract specialized|nbacked|on the data of": VALUE,
    r"modified by an inplace": "forward writes into values that backward needs",
    r"consumed returned": "forward takes the gradient of what it returns",
    r"function `([\w.]+)` in file|(?:builtin (?:operator )?|breaks on )`(?:<\S+ \w+>\.)?([\w.]+?)"
    r"(?:\(\))?\.?`": (r"it calls \1\2, which does not compute with tensors"),
}
_INNER = r"AOT\w*put|INTERNAL ASSERT|proxy|VariableTracker|[Ff]ake ?[Tt]ensor|non-Tensor"
_SUBJECTS = {"task.loss": "the loss", "task.metrics": "a metric"}
_SHOW = f"Mend it there; {TRACEBACK}=1 in front of the command shows the whole traceback."
_OF_LIBRARY = (
    "The line is in {} of an installed package: look for an argument, or a setting of the model,"
    " that goes another way; or call it before training, in __init__ or in the data set."
)
_ELSE = (
    "Write that part with tensors; capture supports what torch.compile(fullgraph=True) supports."
)


class UnfollowedError(FlowrunError):
    """Dynamo, or AOTAutograd, cannot follow a module: `reason` says why, and graph is forward's.

    It is never shown: explain_failure says what is.
    """

    def __init__(self, reason: Exception, graph: torch.fx.Graph | None) -> None:
        super().__init__("model", str(reason))
        self.reason = reason
        self.frames = _frames_of(reason, graph)


def explain_failure(
    first: UnfollowedError,
    second: Exception,
    program: nn.Module,
    values: Sequence[Tensor],
    name: str,
    *,
    train: bool,
) -> RecipeError:
    """Return the error to raise for a failed capture: that of plain torch, else of the second way,
    where that knows what forward does, or of the first.

    program: model and loss as one module, called with `values`, with gradients if `train`.  name:
    class of the model.
    """
    if failed := _failure_of(program, values, train):
        return explain_plain_failure(failed, name)
    where = place(first.frames).partition(" in ")[0]
    if isinstance(second, RecipeError) and where not in second.problem:
        return second
    frames = _frames_of(second)
    if isinstance(second, FrozenError) or (asks_for_values(second) and place(frames)):
        return _explain_capture(second, frames and [*first.frames, *frames], name)
    return _explain_capture(first.reason, first.frames, name)


def _explain_capture(
    error: Exception, frames: Sequence[traceback.FrameSummary], name: str
) -> RecipeError:
    where, reason = place(frames), _summarize(error)
    problem = f"torch could not capture {name}{f' at {where}' if where else ''}: {reason}"
    known = f"{reason} {where} {str(error)[:2000]} {[frame.filename for frame in frames]}"
    instead = [words for key, words in _SWITCHES.items() if re.search(key, known)]
    users = [frame for frame in frames if is_users(frame.filename)]
    if users and is_installed(users[-1].filename) and not instead:
        own = place(frame for frame in users if not is_installed(frame.filename))
        problem += f" (called at {own})" if own not in problem else ""
        instead = [_OF_LIBRARY.format(users[-1].name)]
    instead += [words for key, words in _INSTEAD.items() if re.search(key, known)]
    return RecipeError("model", problem, [*instead, _ELSE][0])


def explain_plain_failure(error: Exception, name: str) -> RecipeError:
    """Return the error to raise for what plain torch cannot do either.

    error: of a call of model and loss.  name: class of the model.
    """
    if isinstance(error, RecipeError):
        return error
    key = _key_of(error)
    subject = _SUBJECTS.get(key, name)
    more = "" if key == "model" else _arguments_in(error)
    return RecipeError(
        key, f"{subject} fails in plain torch, too: {describe_failure(error)}{more}", _SHOW
    )


def describe_failure(error: Exception) -> str:
    """Return class, message and the user's line of an error."""
    return describe_error(error) + (f" ({where})" if (where := place_of(error)) else "")


def explain_widened(program: nn.Module, values: Sequence[Tensor], train: bool) -> str:
    """Return why a call of `program` fails whose weights are wider than it made them, or "" if it
    does not, or fails with weights as they were made, too.
    """
    made_in = _dtypes_as_made(program)
    failed = _failure_of(program, values, train) if made_in else None
    return (
        ""
        if not failed or _failure_of(program, values, train, made_in)
        else describe_failure(failed)
    )


def _arguments_in(error: Exception) -> str:
    """Return as part of a message what the loss that raised an error had of the model and the
    batch.
    """
    called = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    held = next((each for each in called if {"output", "batch"} <= {*each}), {})
    output = f". The model returns {describe_value(held['output'])}." if held else ""
    fields = ", ".join(held.get("batch", ()))
    return f"{output} A batch has {fields}." if isinstance(error, KeyError) and fields else output


def explain_evaluation(
    error: RecipeError, program: nn.Module, values: Sequence[Tensor]
) -> RecipeError:
    """Return the error for a model whose training can be captured, but not its evaluation.

    program: model and loss as one module, called with `values`.
    """
    made: list[str] = []
    keep = lambda *called: made.append(describe_value(called[-1]))  # noqa: E731
    with program.get_submodule("model").register_forward_hook(keep):
        for train in (True, False):
            _failure_of(program.train(train), values, train)
    unlike = ""
    if len({*made}) == 2:
        known = made[1] in error.problem
        unlike = f" {'' if known else f'It returns {made[1]}. '}In training it returns {made[0]}."
    return RecipeError(
        error.where,
        f"in evaluation, where the model is in eval mode: {error.problem}{unlike}",
        f"{error.instead} eval.batches=0 trains without evaluation.".lstrip(),
    )


def describe_value(value: object) -> str:
    """Return words for what a model returns: "a dict {scores: float32 (16, 8)}"."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    inside = ""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {describe_value(each)}" for key, each in value.items())
    elif isinstance(value, tuple | list):
        inside = ", ".join(map(describe_value, value[:4])) + (" …" if value[4:] else "")
    return f"a {type(value).__name__}{f' {{{inside}}}' if inside else ''}"


def _failure_of(
    program: nn.Module,
    values: Sequence[Tensor],
    train: bool,
    made_in: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> Exception | None:
    """Call model and loss as plain torch does, with gradients if `train`; return the error.

    Weights may have no memory yet, so small random numbers stand for them; a large model is called
    with fake tensors, whose own errors do not count: they have no values.  made_in: dtypes of
    weights that have another now.  What forward caches in modules is forgotten.
    """
    held = dict((*program.named_parameters(), *program.named_buffers()))
    is_large = sum(tensor.numel() for tensor in held.values()) > MAX_REAL_NUMBERS
    rng, quiet = torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore")
    shapes = FakeTensorMode(allow_non_fake_inputs=True) if is_large else nullcontext()
    products = _OneDtype() if is_large else nullcontext()
    attributes = [(vars(module), dict(vars(module))) for module in program.modules()]
    try:
        with torch.set_grad_enabled(train), rng, quiet, shapes, products, silence_logs():
            like = torch.empty_like if is_large else _numbers_like
            numbers = {n: like(t, dtype=made_in.get(n, t.dtype)) for n, t in held.items()}
            torch.func.functional_call(program, numbers, tuple(x.clone() for x in values))
    except Exception as error:
        return None if is_of_fake_tensors(error) else error
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
    return None


class _OneDtype(DispatchMode):
    """Raises what a kernel raises, and no fake one does, for a product of tensors of two dtypes."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            dtypes = {str(arg.dtype) for arg in args if isinstance(arg, Tensor)}
            if len(dtypes) > 1:
                raise RuntimeError(f"a product of tensors of {' and '.join(sorted(dtypes))}")
        return func(*args, **(kwargs or {}))


def _dtypes_as_made(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor that is wider than its constructor made it, by name."""
    return {
        f"{path}.{name}".lstrip("."): dtype
        for path, owner in module.named_modules()
        for name, dtype in vars(owner).get(MADE_IN, {}).items()
    }


def _numbers_like(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a tensor, or random ones if it has no memory."""
    if like.device.type != "meta" and like.layout is torch.strided and like.data_ptr():
        made = like.detach().clone().to(dtype)
    elif like.is_floating_point() or like.is_complex():
        drawn = torch.complex64 if like.is_complex() else torch.float32
        made = torch.randn(like.shape, dtype=drawn).mul(0.02).to(dtype)
    else:
        made = torch.zeros(like.shape, dtype=dtype)
    return made.requires_grad_(like.requires_grad)


def _frames_of(
    error: Exception, graph: torch.fx.Graph | None = None
) -> list[traceback.FrameSummary]:
    """Return the frames of the line that torch cannot capture: of Dynamo, of the error, of its
    text, or of the last write in `graph`, of which torch finds too late that it cannot be.
    """
    writes = [node for node in graph.nodes if str(node.target).endswith("_")] if graph else []
    last = writes[-1].stack_trace or "" if writes else ""
    found = (
        getattr(error, "real_stack", None) or (),
        traceback.extract_tb(error.__traceback__),
        _frames_in(str(error)),
        _frames_in(last),
    )
    frames = next((each for each in found if place(each)), ())
    return [frame for frame in frames if "_dynamo" not in frame.filename]  # torch's polyfills


def describe_error(error: BaseException) -> str:
    """Return class and message of an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _key_of(error: BaseException) -> str:
    """Return the recipe's key of what failed: model, task.loss or task.metrics."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [frame.line or "" for frame in frames if frame.name in ("_measure", "<genexpr>")]
    line = called[-1] if called else ""
    if "loss_of(" in line:
        return "task.loss"
    return "task.metrics" if "metric_fns" in line or line.startswith("fn(") else "model"


_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)\n +(.+)$', re.MULTILINE)


def _frames_in(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of the traceback that torch writes into its message, of an op."""
    return [
        traceback.FrameSummary(file, int(number), name, line=line)
        for file, number, name, line in _FRAME.findall(text)
    ]


_NOISE = re.compile(r"^(Set TORCHDYNAMO|For even more|You can suppress|The above exception).*")


def _summarize(error: Exception) -> str:
    """Return Dynamo's title and explanation without hints and logs, or torch's first line."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of its result depends on values ({error.func})"  # see _INSTEAD
    said = re.split("from user code|User Stack", str(error))[0]
    for pattern, words in _REASONS.items():
        if found := re.search(pattern, said):
            return found.expand(words)
    lines = [line for line in map(str.strip, said.splitlines()) if line and not _NOISE.match(line)]
    title = lines[0] if lines else type(error).__name__
    explained = [line for line in lines if line.startswith("Explanation:")]
    more = explained[0].removeprefix("Explanation:").strip() if explained else ""
    if not more and "AssertionError" in type(error).__name__:
        title = f"{type(error).__name__}: {title}"
    text = f"{title.rstrip('.')}: {more}" if more else title
    return "torch cannot capture what it does" if re.search(_INNER, text) else text


def missing_loss_error(output: object) -> RecipeError:
    """Return the error for a model whose output has no loss while task.loss names none."""
    instead = (
        "Set task.loss to a function called with (output, batch), or return a tensor, or a dict or"
        " an object with `loss`."
    )
    if isinstance(output, tuple | list):
        instead += (
            " Where value 0 is the loss: {_target_: flowrun.models.losses.model_loss, part: 0}."
        )
    return RecipeError(
        "task.loss",
        f"task.loss is not set, and the model returns {describe_value(output)}, without `loss`.",
        instead,
    )
