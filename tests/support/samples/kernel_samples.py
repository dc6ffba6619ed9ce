"""Samples of norms, attention, embeddings, convolutions and losses.

Some of these kernels trust the shapes that they are given and would read beyond a tensor's end;
their samples say which local shapes are sound (Sample.sound).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flowrun.engine.capture.patches import substitutes  # noqa: F401  (it defines flowrun::ctc_loss)
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.experts.routed import (
    FIND,
    GATED,
    GATED_BACKWARD,
    RUN,
    RUN_BACKWARD,
    SEND,
    TAKE,
    Routes,
    find_slots,
    send,
)
from flowrun.engine.ops.flow.recurrent import BACKWARD as RECURRENT_BACKWARD
from flowrun.engine.ops.flow.recurrent import FORWARD as RECURRENT
from flowrun.engine.ops.nn.ring_attention import BLOCK, BLOCK_BACKWARD, KeyTurns
from flowrun.engine.ops.proof.simulated_ranks import OpSample, sample
from support.samples.sample_values import T, below, positive

aten = torch.ops.aten
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
_DOCUMENTS = "flowrun.document_attention.default"
_DOCUMENTS_BACKWARD = "flowrun.document_attention_backward.default"

Sound = Callable[[Sequence[Shape]], bool]


# ---- kernels that trust their shapes -------------------------------------------------------------


def same_shape(*inputs: int) -> Sound:
    """These inputs must have one shape."""
    return lambda shapes: len({shapes[k] for k in inputs}) == 1


def _attention(shapes: Sequence[Shape]) -> bool:
    query, key, value = shapes[:3]
    fits = (
        query[:2] == key[:2] == value[:2] and key[2] == value[2] and query[3] == key[3] == value[3]
    )
    return fits and all(_mask_fits(m, query, key) for m in shapes[3:])


def _mask_fits(m: Shape, query: Shape, key: Shape) -> bool:
    scores = (*query[:3], key[2])
    return len(m) in (2, 4) and all(
        a in (1, b) for a, b in zip(m, scores[4 - len(m) :], strict=True)
    )


def _attention_backward(shapes: Sequence[Shape]) -> bool:
    grad, query, key, value, out, logsumexp, *masks = shapes
    return (
        _attention((query, key, value, *masks)) and grad == out == query and logsumexp == query[:3]
    )


def _causal(shapes: Sequence[Shape]) -> bool:
    return _attention(shapes) and shapes[1][2] == 5  # a rank looks at keys by their place


def _causal_backward(shapes: Sequence[Shape]) -> bool:
    return _attention_backward(shapes) and shapes[2][2] == 5


_SOUND = {False: (_attention, _attention_backward), True: (_causal, _causal_backward)}


def _layer_norm_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, mean, rstd, *rest = shapes
    return grad == x and mean == rstd == (*x[:-1], 1) and all(s == x[-1:] for s in rest)


def _group_norm_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, mean, rstd, weight = shapes
    return grad == x == (x[0], 4, 3) and mean == rstd == (x[0], 2) and weight == (4,)


def _embedding_backward(shapes: Sequence[Shape]) -> bool:
    return shapes[0][:-1] == shapes[1]


def _pool_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, *rest = shapes
    return grad == (*x[:-2], 2, 2) and x[-2:] in ((4, 4), (5, 5)) and all(s == grad for s in rest)


# ---- samples -------------------------------------------------------------------------------------

ALL = (True, True, True)  # gradients that are asked for


def _norm() -> list[OpSample]:
    x, w, b = T(5, 3, 4), T(4), T(4)
    _, *stats = aten.native_layer_norm.default(x, [4], w, b, 1e-5)
    g, gw, gb = T(5, 4, 3), T(4), T(4)
    _, *of_groups = aten.native_group_norm.default(g, gw, gb, 5, 4, 3, 2, 1e-5)
    backward = partial(
        sample, "aten.native_layer_norm_backward.default", sound=_layer_norm_backward
    )
    asked = ((w, b, ALL), (w, None, (True, True, False)), (None, None, (True, False, False)))
    return [
        sample("aten.native_layer_norm.default", x, (4,), w, b, 1e-5),
        sample("aten.native_layer_norm.default", x, (4,), None, None, 1e-5),
        sample("aten.native_layer_norm.default", T(5, 3, 4), (3, 4), T(3, 4), None, 1e-5),
        *(backward(T(5, 3, 4), x, (4,), *stats, *rest) for rest in asked),
        sample("aten.native_group_norm.default", g, gw, gb, 5, 4, 3, 2, 1e-5),
        sample(
            "aten.native_group_norm_backward.default",
            *(T(5, 4, 3), g, *of_groups, gw, 5, 4, 3, 2, ALL),
            sound=_group_norm_backward,
        ),
        sample("aten._fused_rms_norm.default", x, (4,), w, 1e-5),
    ]


def _attention_samples() -> list[OpSample]:
    made = []
    name = _FLASH
    masks = ((True, None), (False, None), (False, T(5, 3)), (False, T(3, 1, 5, 3)))
    for causal, attn_mask in masks:
        length = 3 if attn_mask is not None else 5
        given = (T(3, 2, 5, 4), T(3, 2, length, 4), T(3, 2, length, 4))
        extra = {} if attn_mask is None else {"attn_mask": attn_mask}
        out = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, **extra)
        read = (T(3, 2, 5, 4), *given, *out)
        sound, of_backward = _SOUND[causal]
        made += [
            sample(f"{name}.default", *given, 0.0, causal, sound=sound, **extra),
            sample(f"{name}_backward.default", *read, 0.0, causal, sound=of_backward, **extra),
        ]
    return made


def ring_attention(tokens: int = 6) -> list[OpSample]:
    """Samples of a length that two and three ranks divide, and of blocks with turned keys."""
    draws = torch.Generator().manual_seed(1)  # its own: the numbers of other samples stay
    grad, *given = (
        torch.randn(3, 2, tokens, 4, generator=draws, dtype=torch.float64) for _ in range(4)
    )
    made = []
    for causal in (True, False):
        out = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal)
        whole = _alike_and_whole if causal else _alike
        made += [
            sample(f"{_FLASH}.default", *given, 0.0, causal, sound=whole),
            sample(f"{_FLASH}_backward.default", grad, *given, *out, 0.0, causal, sound=whole),
        ]
        for by in (0, 1):
            turns = KeyTurns((2,), (by,), tokens // 2, causal)
            made += [
                sample(BLOCK, *given, None, turns, None, sound=_alike),
                sample(BLOCK_BACKWARD, grad, *given, *out, None, turns, None, sound=_alike),
            ]
    return made + _ring_of_documents(grad, *given)


def _ring_of_documents(grad: torch.Tensor, *given: torch.Tensor) -> list[OpSample]:
    """Samples whose documents begin and end within blocks, at their borders, or go through all."""
    tokens = grad.shape[2]
    documents = torch.tensor([[2, 3, 1], [6, 0, 0], [1, 2, 3]]) * (tokens // 6)
    out = torch.ops.flowrun.document_attention.default(*given, documents, None)
    made = [
        sample(_DOCUMENTS, *given, documents, None, sound=_packed),
        sample(_DOCUMENTS_BACKWARD, grad, *given, *out, documents, None, sound=_packed),
    ]
    for by in (0, 1):
        more = documents, KeyTurns((2,), (by,), tokens // 2, True), None
        made += [
            sample(BLOCK, *given, *more, sound=_of_block),
            sample(BLOCK_BACKWARD, grad, *given, *out, *more, sound=_of_block),
        ]
    return made


def _of_block(shapes: Sequence[Shape]) -> bool:
    return _alike(shapes[:-1]) and shapes[-1] == (shapes[0][0], 3)


def _alike(shapes: Sequence[Shape]) -> bool:
    """All of one shape, but logsumexp, which lacks the width."""
    return len({shape[:3] for shape in shapes}) == 1 and {s[3:] for s in shapes} <= {(), (4,)}


def _alike_and_whole(shapes: Sequence[Shape]) -> bool:
    return _alike(shapes) and shapes[0][2] == 6  # a rank looks at keys by their place


def _packed(shapes: Sequence[Shape]) -> bool:
    """Documents of each sample, two of five tokens or three of six, and keys of all its tokens."""
    *tensors, documents = shapes
    fits = _attention_backward if len(tensors) == 6 else _attention
    key = tensors[2 if len(tensors) == 6 else 1]
    return fits(tensors) and documents == (key[0], key[2] - 3)


def _document_attention() -> list[OpSample]:
    """Samples of two documents, and of one."""
    draws = torch.Generator().manual_seed(0)  # its own: the numbers of other samples stay
    shape = (3, 2, 5, 4)
    grad, *given = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(4))
    documents = torch.tensor([[2, 3], [5, 0], [1, 4]])
    made = torch.ops.flowrun.document_attention.default(*given, documents, None)
    return [
        sample(_DOCUMENTS, *given, documents, None, sound=_packed),
        sample(_DOCUMENTS_BACKWARD, grad, *given, *made, documents, None, sound=_packed),
    ]


def _routed(shapes: Sequence[Shape]) -> bool:
    """Pieces in which all tensors have as many tokens, choices and experts, of one width."""
    *grad, x, chosen, share = (shape for shape in shapes if len(shape) == 2)
    *inside, down = (shape for shape in shapes if len(shape) == 3)
    tokens = {len_of[0] for len_of in (*grad, x, chosen, share)}
    fitting = {(experts, inner) for experts, _, inner in inside} == {down[:2]}
    wide = all(width == x[1] for _, width, _ in inside) and all(g[1] == down[2] for g in grad)
    return len(tokens) == 1 and chosen == share and fitting and wide


def _experts() -> list[OpSample]:
    """Samples in which one expert has no token, and a token chooses no expert twice."""
    draws = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draws, dtype=torch.float64)
    chosen = torch.rand(7, 4, generator=draws).topk(3).indices
    given = normal(7, 2), chosen, normal(7, 3)
    gate, up, down = normal(5, 2, 4), normal(5, 2, 4), normal(5, 4, 8)
    grad = normal(7, 8)
    few, many = (*given, "gelu", 5, up, down), (*given, "silu", 5, gate, up, down)
    return [
        sample("flowrun.experts.default", *few, sound=_routed),
        sample("flowrun.experts_backward.default", grad, *few, sound=_routed),
        sample("flowrun.gated_experts.default", *many, sound=_routed),
        sample("flowrun.gated_experts_backward.default", grad, *many, sound=_routed),
        *_sent_to_experts(),
    ]


def _in_slots(shapes: Sequence[Shape]) -> bool:
    """Pieces of buffers with as many slots, and of matrices that fit each other and them."""
    buffers = [shape for shape in shapes if len(shape) == 4]
    *grad, x = buffers[: len(buffers) // 2]  # before the numbers, and shares, of slots
    *inside, down = (shape for shape in shapes if len(shape) == 3)
    fitting = {(experts, inner) for experts, _, inner in inside} == {down[:2]}
    wide = all(width == x[3] for _, width, _ in inside) and all(g[3] == down[2] for g in grad)
    return len({shape[:3] for shape in buffers}) == 1 and fitting and wide


def _sent_to_experts() -> list[OpSample]:
    """Samples of 7 tokens of one rank, of which some choose one expert of four, on two ranks."""
    draws = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draws, dtype=torch.float64)
    chosen, routes = torch.rand(7, 4, generator=draws).topk(3).indices, Routes(4, 2, (1,), 21, 13)
    pairs, tokens = normal(7, 3, 1), normal(7, 1, 5)
    slots = find_slots(chosen, routes)
    numbers = send(chosen.unsqueeze(-1), slots, -1, routes)
    x, grad, share = (send(rows, slots, 0, routes) for rows in (tokens, normal(7, 1, 6), pairs))
    gate, up, down = normal(4, 5, 3), normal(4, 5, 3), normal(4, 3, 6)
    few, many = ("gelu", routes, up, down), ("silu", routes, gate, up, down)
    return [
        sample(FIND, chosen, routes),
        *(sample(SEND, rows, slots, 0, routes) for rows in (tokens, pairs)),
        sample(SEND, chosen.unsqueeze(-1), slots, -1, routes),
        sample(TAKE, x, slots),
        sample(RUN, x, numbers, *few, sound=_in_slots),
        sample(GATED, x, numbers, *many, sound=_in_slots),
        sample(RUN_BACKWARD, grad, x, numbers, share, *few, sound=_in_slots),
        sample(GATED_BACKWARD, grad, x, numbers, share, *many, sound=_in_slots),
    ]


def _layer(shapes: Sequence[Shape]) -> bool:
    """Pieces of 4 steps and 5 samples, or of some, and of all else: torch looks at few sizes."""
    over = [shape for shape in shapes if len(shape) == 3]
    steps = {shape[0] for shape in over} - {1}
    inside = {shape[2] for shape in over} <= {2, 3, 24, 51}
    weights = {shape for shape in shapes if len(shape) == 2} <= {(9, 2), (9, 3), (12, 2), (12, 3)}
    return len(steps) == 1 == len({shape[1] for shape in over}) and inside and weights


def _recurrent() -> list[OpSample]:
    """Samples of layers of one state, and of two."""
    x, h, grads = T(4, 5, 2), T(1, 5, 3), (T(4, 5, 3), None)
    gru = x, h, T(9, 2), T(9, 3)
    lstm = x, h, T(1, 5, 3), T(12, 2), T(12, 3)
    made = []
    for kind, given in (("gru", gru), ("lstm", lstm)):
        made.append(sample(RECURRENT, given, kind, False, True, None, sound=_layer))
        read = (grads + (None,) * (kind == "lstm"), given, made[-1].made[-1], kind, False, None)
        made.append(sample(RECURRENT_BACKWARD, *read, sound=_layer))
    return made


def _embedding() -> list[OpSample]:
    backward = partial(sample, "aten.embedding_dense_backward.default", sound=_embedding_backward)
    return [
        sample("aten.embedding.default", T(7, 4), below(7, 5, 3)),
        sample("aten.embedding.default", T(7, 4), below(7, 5), 2),
        backward(T(5, 3, 4), below(7, 5, 3), 7, -1, False),
        backward(T(5, 4), torch.tensor([6, 2, 1, 1, 2]), 7, 2, False),
        backward(T(5, 4), torch.tensor([1, 2, 1, 6, 1]), 7, -1, True),
    ]


def _conv() -> list[OpSample]:
    one, two, none = (1, 1), (2, 2), (0, 0)
    plain = (one, one, one, False, none, 1)
    turned = (two, none, one, True, none, 1)
    grouped = (one, one, one, False, none, 2)
    x, pooled = T(5, 3, 4, 4), T(5, 3, 2, 2)
    _, where = aten.max_pool2d_with_indices.default(x, [2, 2])
    forward, backward = (
        partial(sample, f"aten.convolution{name}.default") for name in ("", "_backward")
    )
    pool = partial(sample, sound=_pool_backward)
    asked = (((4,), ALL), (None, (True, True, False)), ((4,), (False, True, True)))
    return [
        forward(T(5, 3, 4, 4), T(4, 3, 3, 3), T(4), *plain),
        forward(T(5, 3, 4, 4), T(4, 3, 3, 3), None, *plain),
        forward(T(5, 3, 2, 2), T(3, 4, 2, 2), T(4), *turned),
        forward(T(3, 4, 4, 4), T(6, 2, 3, 3), T(6), *grouped),
        *(
            backward(T(5, 4, 4, 4), T(5, 3, 4, 4), T(4, 3, 3, 3), bias, *plain, outputs)
            for bias, outputs in asked
        ),
        backward(T(5, 4, 4, 4), T(5, 3, 2, 2), T(3, 4, 2, 2), (4,), *turned, ALL),
        sample("aten.max_pool2d_with_indices.default", x, two),
        pool(
            "aten.max_pool2d_with_indices_backward.default",
            *(pooled, x, two, two, none, one, False, where),
        ),
        sample("aten.avg_pool2d.default", T(5, 3, 4, 4), two),
        pool("aten.avg_pool2d_backward.default", pooled, x, two, two, none, False, True, None),
        sample("aten._adaptive_avg_pool2d.default", T(5, 3, 5, 5), two),
        pool("aten._adaptive_avg_pool2d_backward.default", pooled, T(5, 3, 5, 5)),
    ]


def _loss() -> list[OpSample]:
    of_dim = ((T(5, 4), 1), (T(3, 5, 4), -2))
    made = [sample("aten._safe_softmax.default", x, dim) for x, dim in of_dim]
    for name in ("_softmax", "_log_softmax"):
        for x, dim in ((T(5, 4), 1), (T(3, 5, 4), -2)):
            y = getattr(aten, name).default(x, dim, False)
            given = (T(*x.shape), y, dim, x.dtype)
            made.append(sample(f"aten.{name}.default", x, dim, False))
            made.append(
                sample(f"aten.{name}_backward_data.default", *given, sound=same_shape(0, 1))
            )
    target = torch.tensor([0, 5, 2, -100, 3])
    for reduction, weight in ((0, None), (1, None), (2, None), (2, positive(6)), (1, positive(6))):
        x = T(5, 6)
        rest = (target, weight, reduction, -100)
        loss, total = aten.nll_loss_forward.default(x, *rest)
        made.append(sample("aten.nll_loss_forward.default", x, *rest))
        made.append(sample("aten.nll_loss_backward.default", T(*loss.shape), x, *rest, total))
        given = (x, x.logsumexp(1, True), *rest)
        made.append(sample("flow.cross_entropy", *given))
        made.append(sample("flow.log_sum_exp", x, (1,), True, torch.float64))
        weighed = total if reduction == 1 else None
        made.append(sample("flow.cross_entropy_backward", T(*loss.shape), *given, weighed, None))
        x, of_loss = T(2, 5, 6), T(2, 5) if reduction == 0 else T()
        wide = (x, x.logsumexp(2, True), target.expand(2, 5), weight, reduction, -100)
        made.append(sample("flow.cross_entropy", *wide))
        made.append(sample("flow.cross_entropy_backward", of_loss, *wide, weighed, None))
        made.append(sample("flow.log_sum_exp", x, (2,), True, torch.float64))
        head = (T(5, 3), T(6, 3), T(6), target), (-100, reduction, 2, 4 - reduction, torch.float64)
        made.append(sample("flow.head_statistics", *head))
        made.append(sample("flow.head_gradient", *head, (T(*loss.shape), T(5, 1), weight, weighed)))
        (*_, of_head), how = head
        head = (x[..., :3], T(6, 3), T(6), of_head.expand(2, 5)), how
        made.append(sample("flow.head_statistics", *head))
        made.append(sample("flow.head_gradient", *head, (of_loss, T(2, 5, 1), weight, weighed)))
        made.append(sample("flow.cross_entropy", T(5, 1), T(5, 1), *rest))
        if reduction == 2:
            counted = (target, weight, -100)
            made.append(sample("flow.target_weight", *counted, dtype=torch.float64))
    made.append(sample("aten.nll_loss_forward.default", T(6), torch.tensor(3), None, 2, -100))
    labels = [[[0, 5, 2]], [[-100, 3, 1]], [[4, 4, 0]], [[1, -100, 2]]]
    target = torch.tensor(labels).expand(4, 3, 3)
    for reduction, weight in ((0, None), (1, None), (2, None), (2, positive(6))):
        x, of_classes = T(4, 6, 3, 3), (weight, reduction, -100)
        loss, total = aten.nll_loss2d_forward.default(x, target, *of_classes)
        for name, given in (
            ("forward", (x, target, *of_classes)),
            ("backward", (T(*loss.shape), x, target, *of_classes, total)),
        ):
            made.append(sample(f"aten.nll_loss2d_{name}.default", *given, sound=_nll_2d_sound))
    for reduction in (0, 1, 2):
        made.append(sample("aten.mse_loss.default", T(5, 4), T(5, 4), reduction))
        grad = T(5, 4) if reduction == 0 else T()
        made.append(sample("aten.mse_loss_backward.default", grad, T(5, 4), T(5, 4), reduction))
    return made


def _nll_2d_sound(shapes: Sequence[Shape]) -> bool:
    """Torch's kernels check no shape: a target and a gradient for each of (n, 6, h, w) logits."""
    x = next(shape for shape in shapes if len(shape) == 4)
    of_each = [shape for shape in shapes if len(shape) == 3]
    weights = [shape for shape in shapes if len(shape) == 1]
    whole = x[1] == 6 and all(shape == (6,) for shape in weights)
    return whole and all(shape == (x[0], *x[2:]) for shape in of_each)


def _ctc_sound(shapes: Sequence[Shape]) -> bool:
    """Of equally many samples, all else whole: shapes follow from log_probs (6, n, 4)."""
    at = next(k for k, shape in enumerate(shapes) if len(shape) == 3)
    n = shapes[at][1]
    whole = [(6, n, 4), (n, 2), (n,), (n,), (n,), (n, 6, 5)]
    return list(shapes) == [(n,)] * at + whole[: len(shapes) - at]


def _ctc() -> list[OpSample]:
    log_probs, targets = T(6, 5, 4).log_softmax(-1), 1 + below(3, 5, 2)
    lengths, labels = torch.tensor([6, 5, 6, 4, 6]), torch.tensor([2, 1, 2, 2, 1])
    given = (log_probs, targets, lengths, labels)
    made = torch.ops.flowrun.ctc_loss(*given, 0, False)
    name = "flowrun.ctc_loss"
    return [
        sample(f"{name}.default", *given, 0, False, sound=_ctc_sound),
        sample(f"{name}_backward.default", T(5), *given, *made, 0, False, sound=_ctc_sound),
    ]


def kernel_samples() -> list[OpSample]:
    families = (
        _norm,
        _attention_samples,
        ring_attention,
        _document_attention,
        _experts,
        _recurrent,
        _embedding,
        _conv,
        _loss,
        _ctc,
    )
    return [made for family in families for made in family()]
