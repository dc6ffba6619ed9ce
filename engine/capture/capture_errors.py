"""capture_errors: why a module could not be captured, in the user's own words.

The module is called once as plain torch calls it.  If that fails, too, its error is the message;
else what Dynamo says of the place where it could not go on.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from flowrun.engine.errors import RecipeError
from flowrun.engine.user_code import place, place_of

MOST_NUMBERS = 20_000_000  # of a model that is called with numbers
_BRANCH = "Choose with torch.where: an `if` in Python is decided once, for all steps."
_INSTEAD = (  # what Dynamo, the user's line or torch's own lines say -> what to write instead
    (
        "modules/adaptive.py",
        "Use cross_entropy over all classes: this loss picks rows by the values of its targets.",
    ),
    (
        "pack_padded_sequence",
        "Give the RNN the padded sequence, and mask what it returns behind each length.",
    ),
    (
        "result depends on values",
        "Keep the shape: torch.where(mask, a, b) for x[mask] = …, a product with the mask for sums"
        " over x[mask].",
    ),
    ("ata-dependent", _BRANCH),
    ("guard on", _BRANCH),
    (".item()", "Compute with tensors: .item() and float(tensor) end what can be captured."),
    ("random.", "Draw with torch (torch.rand, nn.Dropout), not with `random` or numpy."),
    ("tp_iternext", "Count in a buffer (self.steps += 1), not with an iterator or a generator."),
    ("set_ on", "Write into a buffer (self.x.copy_(…)), not into its .data."),
    (
        "entirely functional graph",
        "Register the tensor as a buffer (self.register_buffer), and write into that.",
    ),
)
_ELSE = "Capture follows what torch.compile(fullgraph=True) follows: write that part with tensors."


def not_captured(
    error: Exception, program: nn.Module, values: Sequence[Tensor], name: str
) -> RecipeError:
    """The error to raise.

    error: of capture.  program: model and loss as one module, called with values.  name: of the
    model's class.
    """
    try:
        _call(program, values)
    except RecipeError as refused:
        return refused
    except Exception as plain:
        if not type(plain).__module__.startswith("torch._subclasses"):  # in truth it has values
            where = place_of(plain)
            problem = f"{name} fails in plain torch, too: {said_by(plain)}"
            return RecipeError(_key_of(plain), problem + (f" ({where})" if where else ""))
    stack = getattr(error, "real_stack", None) or ()
    where = place(stack) or place_of(error) or place(_frames_in(str(error)))
    said = _explained(error)
    problem = f"torch could not capture {name}{f' at {where}' if where else ''}: {said}"
    known = f"{said} {where} {str(error)[:2000]} {[frame.filename for frame in stack]}"
    return RecipeError("model", problem, next((w for k, w in _INSTEAD if k in known), _ELSE))


def _call(program: nn.Module, values: Sequence[Tensor]) -> None:
    """As plain torch does, with numbers of our own for weights, which may have no memory yet; of a
    large model without numbers.
    """
    held = dict((*program.named_parameters(), *program.named_buffers()))
    with torch.no_grad():
        if sum(tensor.numel() for tensor in held.values()) <= MOST_NUMBERS:
            numbers = {name: _numbers(tensor) for name, tensor in held.items()}
            torch.func.functional_call(program, numbers, tuple(x.clone() for x in values))
            return
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            program(*map(fake.from_tensor, values))


def _numbers(like: Tensor) -> Tensor:
    number = 0.01 if like.is_floating_point() or like.is_complex() else 0
    return torch.full(like.shape, number, dtype=like.dtype)


def said_by(error: BaseException) -> str:
    """Class and text, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _key_of(error: BaseException) -> str:
    """The recipe's key of what failed: a loss or a metric is called beside the model."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [frame.line or "" for frame in frames if frame.name in ("_measured", "<genexpr>")]
    line = called[-1] if called else ""
    if "self.loss(" in line:
        return "task.loss"
    return "task.metrics" if "metric_fns" in line or line.startswith("fn(") else "model"


_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)\n +(.+)$', re.MULTILINE)


def _frames_in(text: str) -> list[traceback.FrameSummary]:
    """The lines of a traceback that torch writes into its message: of an op of its graph."""
    return [
        traceback.FrameSummary(file, int(number), name, line=line)
        for file, number, name, line in _FRAME.findall(text)
    ]


_NOISE = re.compile(r"^(Set TORCHDYNAMO|For even more|You can suppress|The above exception).*")


def _explained(error: Exception) -> str:
    """Dynamo's title and explanation, without its hints and logs; torch's first line of others."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of its result depends on values ({error.func})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not _NOISE.match(line)]
    title = lines[0] if lines else type(error).__name__
    explained = [line for line in lines if line.startswith("Explanation:")]
    more = explained[0].removeprefix("Explanation:").strip() if explained else ""
    if title == "Observed exception" or "AssertionError" in type(error).__name__:
        title = title if more else f"{type(error).__name__}: {title}"
    return _clean(f"{title.rstrip('.')}: {more}" if more else title)


def _clean(text: str) -> str:
    """Without words that are torch's own affair."""
    for word in ("AOTInput", "AOTOutput", "INTERNAL ASSERT FAILED"):
        text = text.replace(word, "")
    return text


def no_loss(output: Any) -> RecipeError:
    """The error of a model that makes no loss, where task.loss names none."""
    kind = type(output).__name__
    keys = f" with {', '.join(map(str, output))}" if isinstance(output, dict) else ""
    return RecipeError(
        "task.loss",
        f"no loss is named, and the model returns a {kind}{keys}, which holds none.",
        "Name task.loss, a function called with (output, batch), or return a tensor, or a dict or"
        " an object with `loss`.",
    )
