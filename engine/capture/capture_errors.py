"""capture_errors: explain to the user why a module could not be captured.

The module is called once as plain torch calls it.  If that fails too, its error is the message;
else the message is Dynamo's, with the user's line where Dynamo stopped.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrun.engine.errors import TRACEBACK, RecipeError
from flowrun.engine.ir.user_code import place, place_of
from flowrun.engine.torch_internals import (
    DynamicOutputShapeException,
    FakeTensorMode,
    is_of_fake_tensors,
)

MAX_REAL_NUMBERS = 20_000_000  # elements of a model that is called with numbers, not with shapes
_BRANCH = "Choose with torch.where: an `if` in Python is decided once, for all steps."
_COUNT = "Count in a buffer (self.steps += 1), not with an iterator or a generator."
_REGISTER = "Register the tensor as a buffer (self.register_buffer), and write into that."
# words of Dynamo's message, of the user's line or of torch's file names -> what to write instead
_INSTEAD = (
    (
        "modules/adaptive.py",
        "Use cross_entropy over all classes; this loss selects rows by the values of its targets.",
    ),
    (
        "kl_divergence",
        "Write the divergence as a formula: torch finds that of two distributions in Python.",
    ),
    (
        "torch/distributions/",
        "Give distributions validate_args=False: their checks look at values.",
    ),
    (
        "pack_padded_sequence",
        "Pass the padded sequence to the RNN, and mask its output past each length.",
    ),
    (
        "result depends on values",
        "Keep the shape: torch.where(mask, a, b) for x[mask] = …, a product with the mask for sums"
        " over x[mask].",
    ),
    ("ata-dependent", _BRANCH),
    ("guard on", _BRANCH),
    (".item()", "Compute with tensors; .item() and float(tensor) cannot be captured."),
    ("random.", "Draw with torch (torch.rand, nn.Dropout), not with `random` or numpy."),
    ("tp_iternext", _COUNT),
    ("__next__", _COUNT),  # torch 2.12
    ("set_ on", "Write into a buffer (self.x.copy_(…)), not into its .data."),
    ("entirely functional graph", _REGISTER),
    ("allow_non_fake_inputs", _REGISTER),  # torch 2.12
)
_SUBJECTS = {"task.loss": "the loss", "task.metrics": "a metric"}
_SHOW = f"{TRACEBACK}=1 in front of the command shows the whole traceback."
_ELSE = (
    "Write that part with tensors; capture supports what torch.compile(fullgraph=True) supports."
)


def explain_failure(
    error: Exception, program: nn.Module, values: Sequence[Tensor], name: str
) -> RecipeError:
    """Return the error to raise for a failed capture.

    program: model and loss as one module, called with `values`.  name: class of the model.
    """
    try:
        _call(program, values)
    except RecipeError as refused:
        return refused
    except Exception as plain:
        # an error of fake tensors: the real call has values
        if not is_of_fake_tensors(plain):
            return explain_plain_failure(plain, name)
    stack = getattr(error, "real_stack", None) or ()
    where = place(stack) or place_of(error) or place(_frames_in(str(error)))
    reason = _summarize(error)
    problem = f"torch could not capture {name}{f' at {where}' if where else ''}: {reason}"
    known = f"{reason} {where} {str(error)[:2000]} {[frame.filename for frame in stack]}"
    return RecipeError("model", problem, next((w for k, w in _INSTEAD if k in known), _ELSE))


def explain_plain_failure(error: Exception, name: str) -> RecipeError:
    """Return the error to raise for what plain torch cannot do either.

    error: of a call of model, loss and metrics.  name: class of the model.
    """
    where, key = place_of(error), _key_of(error)
    subject = name if key == "model" else _SUBJECTS[key]
    problem = f"{subject} fails in plain torch, too: {describe_error(error)}"
    return RecipeError(key, problem + (f" ({where})" if where else ""), _SHOW)


def _call(program: nn.Module, values: Sequence[Tensor]) -> None:
    """Call the module as plain torch does.

    Weights may have no memory yet, so constants stand for them; a large model is called with fake
    tensors.
    """
    held = dict((*program.named_parameters(), *program.named_buffers()))
    with torch.no_grad():
        if sum(tensor.numel() for tensor in held.values()) <= MAX_REAL_NUMBERS:
            numbers = {name: _constant_like(tensor) for name, tensor in held.items()}
            torch.func.functional_call(program, numbers, tuple(x.clone() for x in values))
            return
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            program(*map(fake.from_tensor, values))


def _constant_like(like: Tensor) -> Tensor:
    number = 0.01 if like.is_floating_point() or like.is_complex() else 0
    return torch.full(like.shape, number, dtype=like.dtype)


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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not _NOISE.match(line)]
    title = lines[0] if lines else type(error).__name__
    explained = [line for line in lines if line.startswith("Explanation:")]
    more = explained[0].removeprefix("Explanation:").strip() if explained else ""
    if title == "Observed exception" or "AssertionError" in type(error).__name__:
        title = title if more else f"{type(error).__name__}: {title}"
    text = f"{title.rstrip('.')}: {more}" if more else title
    return re.sub("AOTInput|AOTOutput|INTERNAL ASSERT FAILED", "", text)  # torch's internals


def missing_loss_error(output: object) -> RecipeError:
    """Return the error for a model whose output has no loss while task.loss names none."""
    kind = type(output).__name__
    keys = f" with {', '.join(map(str, output))}" if isinstance(output, dict) else ""
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
        f"task.loss is not set, and the model returns a {kind}{keys}, which has no `loss`.",
        instead,
    )
