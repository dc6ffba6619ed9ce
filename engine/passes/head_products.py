"""head_products: how a linear layer and the cross entropy of its logits are computed.

chunk_loss    captured -> captured.  `engine.loss_chunks` makes of both two ops that never hold
              whole logits (ops/nn/chunked_head.py), and refuses whatever else reads logits.
pad_classes   trained -> trained.  The products see a multiple of 64 classes.  GPT-2 has 50,257:
              no two rows of logits are aligned, and kernels of a GPU read them piecemeal.
              flow.product adds zeros to what a rank has of the classes and cuts them off
              again.  Built code pads where it makes the gradient of logits; a weight is copied
              each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowrun.engine.capture.rewrites.simplify import drop_dead
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.flow.structure import PIN
from flowrun.engine.ops.math.matmul import MULTIPLE, PRODUCT
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn.chunked_head import GRADIENT, STATISTICS
from flowrun.engine.ops.nn.cross_entropy import BACKWARD, FORWARD, LOG_SUM_EXP, given
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy

MOST_ADDED = 1 / 16  # share of the classes; a few are not worth it
_T, _SUM, _LSE = "aten.t.default", "aten.sum.dim_IntList", "aten.logsumexp.default"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_KEY, _PRODUCT = "engine.loss_chunks", "product"
_GRADIENTS = _OF_X, _OF_WEIGHT, _OF_BIAS = "of x", "of weight", "of bias"
# product -> its equation, where "c" are the classes
_EQUATIONS = {_PRODUCT: "mk,ck->mc", _OF_X: "mc,ck->mk", _OF_WEIGHT: "mc,mk->ck"}
_New = dict[str, tuple[Op, ...]]  # name of an op -> the ops in its place


def chunk_loss(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Replace heads and their losses.  Raises RecipeError where one has another form."""
    if strategy.loss_chunks == 1:
        return graph
    tensors, new, notes = dict(graph.tensors), _New(), dict[str, str]()
    for roles, problem in _find_heads(graph):
        if problem:
            raise _refuse(problem)
        new |= dict.fromkeys((op.name for op in roles.values()), ())
        new |= _in_chunks(graph, roles, strategy, tensors)
        module = roles[_PRODUCT].module
        notes[module] = f"{module}: with its loss in {strategy.loss_chunks} chunks of rows ({_KEY})"
    if not new:
        raise _refuse("the loss must be a cross entropy of logits alone, without label smoothing")
    return _rewrite(graph, new, tensors, notes)


def pad_classes(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Replace the products with a dim of classes, if the strategy asks for it."""
    new, notes = _New(), dict[str, str]()
    for roles, _ in _find_heads(graph) if strategy.pads_classes else ():
        for role in _EQUATIONS.keys() & roles.keys():
            (x, weight, bias), op = _operands(graph, roles[_PRODUCT]), roles[role]
            if (classes := graph.tensors[weight].shape[0]) and _adds_few(classes):
                first = x if role == _PRODUCT else _turn_back(graph, op.inputs[0])
                read = Ref(first), Ref(x if role == _OF_WEIGHT else weight)
                args = (*read, bias if role == _PRODUCT else None, _EQUATIONS[role])
                new[op.name] = (replace(op, target=PRODUCT, args=args, table=None),)
                notes[op.module] = (
                    f"{op.module}: its products see a multiple of {MULTIPLE} classes, zeros after"
                    f" the {classes:,} (engine.pad_classes)"
                )
    return _rewrite(graph, new, dict(graph.tensors), notes) if new else graph


def _in_chunks(
    graph: LogicalGraph,
    roles: Mapping[str, Op],
    strategy: Strategy,
    tensors: dict[str, LogicalTensor],
) -> _New:
    """Return the ops in the place of a loss and its gradient; tensors: gets what they make."""
    x, weight, bias = _operands(graph, roles[_PRODUCT])
    loss, (lse,), (rows, _) = roles[FORWARD], roles[_LSE].makes, tensors[x].shape
    if rows < strategy.loss_chunks:
        raise _refuse(f"{rows} rows of logits are fewer than {strategy.loss_chunks} chunks")
    named, own = given(loss), f"{loss.name}_own"
    tensors[own] = replace(tensors[lse], name=own, dtype=tensors[x].dtype)
    pads = strategy.pads_classes and _adds_few(tensors[weight].shape[0])
    sizes = (strategy.loss_chunks, MULTIPLE if pads else 1, tensors[lse].dtype)
    head = (Ref(x), Ref(weight), bias, named["target"])
    args = (head, (named["ignored"], named["reduction"], *sizes))
    made = replace(loss, name=own, target=STATISTICS, args=args, outputs=(own, lse))
    made = replace(made, module=roles[_PRODUCT].module)
    new: _New = {loss.name: (made, replace(loss, args=(Ref(own), *loss.args[1:])))}
    if (backward := roles.get(BACKWARD)) is not None:
        named = given(backward)
        of_loss = tuple(named[name] for name in ("grad", "lse", "weight", "total"))
        outputs = tuple(roles[r].makes[0] if r in roles else None for r in _GRADIENTS)
        made = replace(made, name=backward.name, phase=backward.phase, target=GRADIENT)
        new[backward.name] = (replace(made, args=(*args, of_loss), outputs=outputs),)
    return new


def _rewrite(
    graph: LogicalGraph, new: _New, tensors: dict[str, LogicalTensor], notes: Mapping[str, str]
) -> LogicalGraph:
    """Put ops in the place of others, and leave out what nobody reads any more."""
    ops = tuple([each for op in graph.ops for each in new.get(op.name, (op,))])
    graph = replace(graph, ops=ops, tensors=tensors)
    return drop_dead(replace(graph, notes=(*graph.notes, *notes.values())))


def _refuse(problem: str) -> RecipeError:
    instead = "Write engine.loss_chunks=1, or let cross entropy alone read what an nn.Linear makes."
    return RecipeError(_KEY, f"{problem}.", instead)


# ---- a head and all that reads its logits or their gradient --------------------------------------


def _find_heads(graph: LogicalGraph) -> Iterator[tuple[dict[str, Op], str]]:
    """Yield of each cross entropy: what an op is -> the op ("product", its target, one of the
    gradients, the name of a cast or view), and why logits must be whole ("": they need not).
    """
    for loss in (op for op in graph.ops if op.target == FORWARD):
        logits = given(loss)["x"].name
        while (product := graph.producer.get(logits)) and _carries_classes(graph, product):
            logits = product.inputs[0]
        linear = product is not None and product.target in _PRODUCTS
        x, weight, _ = _operands(graph, product) if product and linear else ("", "", None)
        if product is None or weight in ("", *product.inputs):
            yield {}, f"{logits} is not what an nn.Linear makes"
            continue
        roles = {_PRODUCT: product}
        problem = _add_roles(graph, [given(loss)["lse"].name, logits], roles, {})
        gradient = [roles[BACKWARD].makes[0]] if BACKWARD in roles else []
        other = _add_roles(graph, gradient, roles, {weight: _OF_X, x: _OF_WEIGHT})
        yield roles, problem or other


def _add_roles(
    graph: LogicalGraph, names: list[str], roles: dict[str, Op], products: Mapping[str, str]
) -> str:
    """Add what reads logits, or their gradient; return who needs them whole."""
    problem = ""
    while names:
        for op in graph.consumers.get(names.pop(), ()):
            role = _role(graph, op, products)
            if not role or roles.setdefault(role, op) != op:
                problem = f"{op.target} of {op.module} reads the logits of {roles[_PRODUCT].module}"
            elif role == op.name:
                names.append(op.makes[0])
    return problem


def _role(graph: LogicalGraph, op: Op, products: Mapping[str, str]) -> str:
    """Return what a reader of logits, or of their gradient, is; "": it needs them whole.

    products: of the gradient: tensor -> what the product with it is.
    """
    if op.target != PIN and _carries_classes(graph, op):
        before, after = (graph.tensors[name].dtype for name in (op.inputs[0], op.makes[0]))
        return op.name if products or after.itemsize >= before.itemsize else ""
    if not products:
        if op.target in (_LSE, LOG_SUM_EXP) and op.args[1:3] == ((1,), True):
            return _LSE
        return op.target if op.target in (FORWARD, BACKWARD) else ""
    if (op.target, *op.args[1:]) == (_SUM, (0,), True):
        return _OF_BIAS
    return products.get(op.inputs[-1], "") if op.target in _PRODUCTS else ""


def _carries_classes(graph: LogicalGraph, op: Op) -> bool:
    """True of casts, transpositions, and views whose last dim stays."""
    view = has(op.target, Trait.RESHAPE) or has(op.target, Trait.IDENTITY)
    before, after = (graph.tensors[name].shape for name in (op.inputs[0], op.makes[0]))
    return op.target in (CAST, _T) or (view and before[-1:] == after[-1:])


def _operands(graph: LogicalGraph, product: Op) -> tuple[str, str, Ref | None]:
    """Return x, the weight and the bias of a linear layer."""
    *bias, x, turned = product.inputs
    return x, _turn_back(graph, turned), Ref(bias[0]) if bias else None


def _turn_back(graph: LogicalGraph, name: str) -> str:
    """Return what a transposition turns, or the tensor itself."""
    maker = graph.producer.get(name)
    return maker.inputs[0] if maker is not None and maker.target == _T else name


def _adds_few(classes: int) -> bool:
    return 0 < -classes % MULTIPLE <= classes * MOST_ADDED
