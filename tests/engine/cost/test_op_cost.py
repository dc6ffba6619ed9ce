from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import AttentionSpeed, Hardware, Products
from flowrun.engine.ir.graph import BACKWARD, FORWARD, WEIGHT_GRAD, LogicalTensor, Op, Ref
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.flow.recurrent import BACKWARD as RECURRENT_BACKWARD
from flowrun.engine.ops.flow.recurrent import FORWARD as RECURRENT
from flowrun.engine.ops.math.grouped import GROUPED, GROUPED_BACKWARD
from flowrun.engine.ops.registry import info

CURVE = (2e6, 2e8, 2e9), (0.5, 0.75, 1.0)
HARDWARE = Hardware(
    fp32=Products(1e9, *CURVE),
    bf16=Products(4e9, *CURVE),
    tf32=Products(8e9),
    fp16=Products(),
    memory_bytes_per_s=1e9,
    elements_per_s={"aten._softmax.default": 1e8, "flow.update_rows": 1e7},
)
START_S = 4e-6
FP32, BF16 = torch.float32, torch.bfloat16


def seconds(
    target: str,
    *shapes: tuple[int, ...],
    dtype: torch.dtype = FP32,
    out: torch.dtype | None = None,
    phase: str = FORWARD,
    more: Sequence[Any] = (),
    **keys: Any,
) -> float:
    """Of an op without its start: shapes of what it reads, then of what it makes.  more: its other
    arguments.  keys: of the hardware profile.
    """
    reads = [f"x{k}" for k in range(len(shapes) - 1)]
    tensors = {name: LogicalTensor(name, x, dtype) for name, x in zip(reads, shapes, strict=False)}
    tensors["z"] = LogicalTensor("z", shapes[-1], out or dtype)
    args = (*map(Ref, reads), *more)
    op = Op("z", target, args, (), outputs=("z",), module="net", phase=phase)
    hardware = replace(HARDWARE, **keys)
    return SizedOp(op, shapes[:-1], shapes[-1:], tensors).seconds(hardware) - START_S


def product(side: int, **keys: Any) -> float:
    return seconds("aten.mm.default", *[(side, side)] * 3, **keys)


def of_one(target: str, **keys: Any) -> float:
    return seconds(target, (100, 100), (100, 100), **keys)


@pytest.mark.parametrize(
    ("dtype", "flops"),
    [(FP32, 1e9), (BF16, 4e9), (torch.float16, 1e9)],
    ids=["fp32", "bf16", "fp16 as fp32"],
)
def test_a_product_takes_its_arithmetic_at_the_speed_of_its_dtype(
    dtype: torch.dtype, flops: float
) -> None:
    assert product(1000, dtype=dtype) == pytest.approx(2 * 1000**3 / flops)
    assert product(100, dtype=dtype) == pytest.approx(2 * 100**3 / flops / 0.5)
    assert product(50, dtype=dtype) == pytest.approx(2 * 50**3 / flops / 0.5)


@pytest.mark.parametrize(("fp8", "flops"), [(Products(8e9), 8e9), (Products(), 4e9)])
def test_a_product_of_8_bits_has_its_own_speed_or_that_of_bf16(fp8: Products, flops: float) -> None:
    shapes = (1000, 1000), (1000, 1000), (1, 1), (1, 1), (1000, 1000)
    found = seconds(
        "aten._scaled_mm.default", *shapes, dtype=torch.float8_e4m3fn, out=FP32, fp8=fp8
    )
    assert found == pytest.approx(2 * 1000**3 / flops)


def test_between_the_points_of_a_curve_the_share_follows_the_logarithm() -> None:
    products = Products(1e9, *CURVE)
    expected = pytest.approx([0.5, 0.5, 0.625, 0.75, 1.0, 1.0])
    assert [products.share_at(flop) for flop in (1e3, 2e6, 2e7, 2e8, 2e9, 1e12)] == expected
    assert Products(1e9).seconds(2e9) == 2.0


def test_fp32_products_run_as_tf32_where_the_profile_says_so() -> None:
    tf32 = replace(HARDWARE, uses_tf32=True)
    assert tf32.products("fp32") == Products(8e9)
    assert tf32.products("fp16") == Products(8e9)  # no speed of its own
    assert tf32.products("bf16") == HARDWARE.bf16


def test_elements_count_where_they_take_longer_than_the_bytes() -> None:
    assert of_one("aten._softmax.default") == pytest.approx(100**2 / 1e8)
    assert of_one("aten.exp.default") == pytest.approx(8 * 100**2 / 1e9)


def test_of_a_table_the_rows_that_are_updated_count() -> None:
    table = (100_000, 8)
    assert seconds("flow.update_rows", table, (50,), (50, 8), table) == pytest.approx(4e-5)


def test_products_of_heads_have_a_speed_of_their_own() -> None:
    one, slow = (
        seconds("aten.bmm.default", *[(4, 100, 100)] * 3, phase=BACKWARD, **keys)
        for keys in ({}, {"batched_share": 0.25})
    )
    assert slow / one == pytest.approx(4)


@pytest.mark.parametrize(
    ("dtype", "out", "num_bytes"),
    [(FP32, FP32, 8), (BF16, BF16, 4), (FP32, BF16, 6)],
    ids=["fp32", "bf16", "a cast"],
)
def test_an_elementwise_op_takes_the_bytes_that_it_reads_and_writes(
    dtype: torch.dtype, out: torch.dtype, num_bytes: int
) -> None:
    taken = of_one("aten.relu.default", dtype=dtype, out=out)
    assert taken == pytest.approx(num_bytes * 100**2 / 1e9)


def test_a_bias_of_its_own_pass_reads_and_writes_the_product_once_more() -> None:
    one, apart = (
        seconds("aten.addmm.default", (100,), (50, 1000), (1000, 100), (50, 100), bias_apart=apart)
        for apart in (False, True)
    )
    assert apart - one == pytest.approx(2 * 4 * 50 * 100 / 1e9 + START_S)


def test_what_a_product_writes_beyond_a_cube_is_written_behind_it() -> None:
    """A short inner dim: 8 times the output of the cube of as many multiplications."""
    one, behind = (
        seconds("aten.mm.default", (256, 8), (8, 256), (256, 256), writes_behind=writes)
        for writes in (False, True)
    )
    cube = round((256 * 8 * 256) ** (2 / 3))
    assert behind - one == pytest.approx(4 * (256**2 - cube) / 1e9)
    assert product(100, writes_behind=True) == pytest.approx(product(100)), "a cube"


def test_a_product_computes_whole_tiles_but_not_of_fewer_columns() -> None:
    """There are kernels with smaller tiles for these."""

    def took(columns: int) -> float:
        shapes = (2, 640, 32), (2, 32, columns), (2, 640, columns)
        return seconds("aten.bmm.default", *shapes, tile=64, memory_bytes_per_s=1e15)

    assert took(65) == took(96) == took(128) < took(129) == took(192)
    assert took(8) < took(32) < took(64) < took(65)


def test_a_view_takes_nothing() -> None:
    assert of_one("aten.t.default") == -START_S


@pytest.mark.parametrize(("phase", "share"), [(BACKWARD, 0.97), (WEIGHT_GRAD, 0.9)])
def test_a_product_of_backward_is_slower_than_one_of_forward(phase: str, share: float) -> None:
    assert product(512, phase=phase) == pytest.approx(product(512) / share)


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "times"),
    [
        pytest.param(3, 1, FP32, 2.25, id="3 x 3"),
        pytest.param(1, 1, FP32, 1.0, id="1 x 1"),
        pytest.param(3, 2, FP32, 1.0, id="every other place"),
        pytest.param(3, 1, BF16, 1.0, id="narrow"),
    ],
)
def test_small_convolutions_take_fewer_multiplications_than_counted(
    size: int, stride: int, dtype: torch.dtype, times: float
) -> None:
    side = 64 // stride
    shapes = (8, 64, 64, 64), (64, 64, size, size), (8, 64, side, side)
    more = (None, (stride,) * 2, (size // 2,) * 2, (1, 1), False, (0, 0), 1)
    plain, small = (
        seconds("aten.convolution.default", *shapes, dtype=dtype, more=more, winograd=winograd)
        for winograd in (1.0, 2.25)
    )
    assert plain / small == pytest.approx(times)


def test_a_hash_of_many_small_ops_takes_its_way_through_memory_on_a_cpu() -> None:
    """120 bytes an element at 1e9 a second, and the byte that is made."""
    more = (0, "z", (1000,), 0.1)
    cpu, gpu = (
        seconds("flow.dropout_mask", (), (1000,), out=torch.bool, more=more, device=device)
        for device in ("cpu", "cuda")
    )
    assert cpu == pytest.approx(121e-6, rel=1e-2)
    assert gpu == pytest.approx(1e-6, rel=1e-1)


def test_experts_are_products_of_the_tokens_that_are_theirs() -> None:
    """4 of 8 experts have half of 100 tokens; gradients of input and weight are two products."""
    forward, backward = (
        Op("y", target, (), (), outputs=("y",)) for target in (GROUPED, GROUPED_BACKWARD)
    )
    held = [(100, 16), (4, 16, 32), (8,)]
    assert SizedOp(forward, held, [(100, 32)], {}).flops == 2 * 50 * 16 * 32
    both = [(100, 16), (4, 16, 32)]
    assert SizedOp(backward, [*held, (100, 32)], both, {}).flops == 2 * 2 * 50 * 16 * 32
    assert SizedOp(backward, [*held, (100, 32)], [None, both[1]], {}).flops == 2 * 50 * 16 * 32


def test_experts_multiply_the_tokens_that_chose_them() -> None:
    """Half of 100 tokens with 3 choices each chose 4 of 8; backward makes 5 products, not 4."""
    names = "x", "chosen", "share", "up", "down"
    args = (*map(Ref, names[:3]), "gelu", 8, *map(Ref, names[3:]))
    held = [(100, 16), (100, 3), (100, 3), (4, 16, 32), (4, 32, 16)]
    op = Op("y", "flowrun.experts.default", args, (), outputs=("y",))
    assert SizedOp(op, held, [(100, 16)], {}).flops == 2 * 2 * 150 * 16 * 32
    grads = names[0], *names[2:]
    op = replace(op, target=EXPERTS_BACKWARD, args=(Ref("grad"), *args), outputs=grads)
    made = [held[0], *held[2:]]
    assert SizedOp(op, [(100, 16), *held], made, {}).flops == 5 * 2 * 150 * 16 * 32


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3), ("rnn_relu", 1)])
def test_a_recurrent_layer_takes_its_products_step_by_step(
    kind: str, gates: int, both_ways: bool
) -> None:
    """9 steps of 5 samples, from 6 to 7 numbers: of x at once, of a state 9 times."""
    of_way = [(gates * 7, 6), (gates * 7, 7), (gates * 7,), (gates * 7,)]
    ways, x = 1 + both_ways, (9, 5, 6)
    states = [(ways, 5, 7)] * (2 if kind == "lstm" else 1)
    read = [x, *states, *of_way * ways]
    refs = [Ref(f"x{k}") for k in range(len(read))]
    forward = Op("y", RECURRENT, (tuple(refs), kind, both_ways, True, None), (), outputs=("y",))
    args = ((Ref("grad"),), tuple(refs), Ref("kept"), kind, both_ways, None)
    backward = Op("y", RECURRENT_BACKWARD, args, (), outputs=("y",))
    out, kept = (9, 5, ways * 7), (9, 5, 99)
    for op, ins in ((forward, read), (backward, [out, *read, kept])):
        parts = info(op.target).cost.parts
        assert parts
        products = [part for part in parts(op, ins) if part[1].target == "aten.mm.default"]
        flops = [times * SizedOp(*part, {}).flops for times, *part in products]
        assert sum(flops) == SizedOp(op, ins, [out], {}).flops
        assert [part[0] for part in products] == [
            1 + (op is backward),
            9 + 9 * (op is backward),
        ] * ways


def test_a_transposed_convolution_multiplies_what_it_reads() -> None:
    """3 channels of 4 x 4 to 5 of 8 x 8, kernels of 2 x 2: each number meets 5 x 4 weights."""
    args = (Ref("x"), Ref("w"), None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    op = Op("y", "aten.convolution.default", args, (), outputs=("y",))
    assert SizedOp(op, [(1, 3, 4, 4), (3, 5, 2, 2)], [(1, 5, 8, 8)], {}).flops == 2 * 3 * 16 * 5 * 4


EXPERTS_BACKWARD = "flowrun.experts_backward.default"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
DOCUMENTS = "flowrun.document_attention"
GPU = replace(HARDWARE, device="cuda", fp32=Products(1e9), attention_share=1.0, op_s=0.0)


def attention(
    query: Shape, key: Shape, hardware: Hardware, *, causal: bool = True, mask: Shape | None = None
) -> tuple[float, float]:
    """Seconds of (forward, backward)."""
    names, sizes = ("q", "k", "v", "o", "l"), (query, key, key, query, query[:3])
    tensors = {x: LogicalTensor(x, size, FP32) for x, size in zip(names, sizes, strict=True)}
    q, k, v, o, lse = map(Ref, names)
    masked = () if mask is None else (("attn_mask", Ref("m")),)
    more = () if mask is None else (mask,)
    tensors["m"] = LogicalTensor("m", mask or (), FP32)
    calls = (
        ("", (q, k, v, 0.0, causal), sizes[:3]),
        ("_backward", (o, q, k, v, o, lse, 0.0, causal), (query, *sizes)),
    )
    one, two = (
        SizedOp(
            Op("o", f"{ATTENTION}{ending}.default", args, masked, outputs=("o",), module=""),
            (*shapes, *more),
            [query],
            tensors,
        ).seconds(replace(hardware, memory_bytes_per_s=1e30))
        for ending, args, shapes in calls
    )
    return one, two


@pytest.mark.parametrize(
    ("queries", "keys", "pairs"),
    [(64, 64, 64 * 65 / 2), (16, 64, 16 * 17 / 2 + 48 * 16), (64, 16, 16 * 17 / 2 + 48 * 16)],
    ids=["square", "fewer queries", "fewer keys"],
)
def test_causal_attention_computes_what_a_query_sees(queries: int, keys: int, pairs: int) -> None:
    """2 products of forward, 5 of backward."""
    taken = attention((2, 3, queries, 8), (2, 3, keys, 8), GPU)
    assert taken == pytest.approx([n * 2 * 2 * 3 * 8 * pairs / 1e9 for n in (2, 5)])


def test_attention_with_a_mask_computes_all_pairs() -> None:
    size = (2, 3, 64, 8)
    for mask in (None, (64, 64)):
        taken = attention(size, size, GPU, causal=False, mask=mask)
        assert taken == pytest.approx([n * 2 * 2 * 3 * 8 * 64 * 64 / 1e9 for n in (2, 5)])


def test_splits_of_samples_and_heads_share_the_work_of_attention() -> None:
    whole, part = (attention((n, n, 64, 8), (n, n, 64, 8), GPU) for n in (4, 2))
    assert whole == pytest.approx([4 * each for each in part])


@pytest.mark.parametrize(("length", "share"), [(512, 1.0), (1024, 0.75), (4096, 0.5625)])
def test_attention_of_a_cpu_leaves_out_blocks_of_512_keys(length: int, share: float) -> None:
    size, cpu = (1, 1, length, 8), replace(GPU, device="cpu")
    causal, full = (attention(size, size, cpu, causal=each) for each in (True, False))
    assert causal == pytest.approx([share * each for each in full])


def test_documents_count_as_one_that_fills_its_sample() -> None:
    size = (2, 3, 64, 8)
    args = (*map(Ref, "qkvd"), None)
    op = Op("o", f"{DOCUMENTS}.default", args, (), outputs=("o",), module="")
    tensors = {"o": LogicalTensor("o", size, FP32)} | {
        x: LogicalTensor(x, size, FP32) for x in "qkvd"
    }
    fast = replace(GPU, memory_bytes_per_s=1e30)
    taken = SizedOp(op, (size, size, size, (2, 9)), [size], tensors).seconds(fast)
    assert taken == pytest.approx(attention(size, size, GPU)[0])


def test_fused_attention_has_the_speed_of_its_width_and_keys() -> None:
    """A causal mask leaves 128 keys of 255 and 512 of 1023 in the mean."""
    tables = (
        AttentionSpeed(64, (128.0, 512.0), (0.25, 0.5), (0.125, 0.25)),
        AttentionSpeed(128, (128.0,), (1.0,), (0.5,)),
    )
    gpu = replace(GPU, attention=tables)
    for width, length, share in ((64, 255, 0.25), (64, 511, 0.375), (80, 1023, 0.5), (96, 255, 1)):
        size = (1, 1, length, width)
        forward, backward = attention(size, size, GPU)
        taken = attention(size, size, gpu)
        assert taken == pytest.approx((forward / share, 2 * backward / share))
        halved = replace(gpu, attention_share=0.5)
        assert attention(size, size, halved) == pytest.approx([2 * each for each in taken])


def test_a_mask_of_fused_attention_needs_a_slower_kernel() -> None:
    size = (1, 1, 64, 8)
    gpu = replace(GPU, attention=(AttentionSpeed(8, (64.0,), (0.5,), (0.5,)),), masked_share=0.25)
    full, masked = (attention(size, size, gpu, causal=False, mask=m) for m in (None, (64, 64)))
    assert masked == pytest.approx([4 * each for each in full])
