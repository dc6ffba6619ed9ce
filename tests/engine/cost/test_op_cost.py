"""Foreseen seconds of an op: what is computed, and in which dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowrun.engine.cost.op_cost import op_flops, op_seconds
from flowrun.engine.hardware.hardware import Hardware, Products
from flowrun.engine.ir.graph import BACKWARD, FORWARD, WEIGHT_GRAD, LogicalTensor, Op, Ref
from flowrun.engine.ops.math.grouped import GROUPED, GROUPED_BACKWARD

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


def seconds(
    target: str, side: int, dtype: torch.dtype, out: torch.dtype, phase: str = FORWARD
) -> float:
    """Of an op on one or two square matrices, without its start."""
    reads = ("x", "y") if target == "aten.mm.default" else ("x",)
    shape = (side, side)
    op = Op("z", target, tuple(map(Ref, reads)), (), outputs=("z",), module="net", phase=phase)
    tensors = {name: LogicalTensor(name, shape, dtype) for name in reads} | {
        "z": LogicalTensor("z", shape, out)
    }
    return op_seconds(op, [shape] * len(reads), [shape], tensors, HARDWARE) - START_S


@pytest.mark.parametrize(
    ("dtype", "flops"),
    [(torch.float32, 1e9), (torch.bfloat16, 4e9), (torch.float16, 1e9)],
    ids=["fp32", "bf16", "fp16 as fp32"],
)
def test_a_product_takes_its_arithmetic_at_the_speed_of_its_dtype(
    dtype: torch.dtype, flops: float
) -> None:
    assert seconds("aten.mm.default", 1000, dtype, dtype) == pytest.approx(2 * 1000**3 / flops)
    assert seconds("aten.mm.default", 100, dtype, dtype) == pytest.approx(2 * 100**3 / flops / 0.5)
    assert seconds("aten.mm.default", 50, dtype, dtype) == pytest.approx(2 * 50**3 / flops / 0.5)


def test_between_the_points_of_a_curve_the_share_follows_the_logarithm() -> None:
    products = Products(1e9, *CURVE)
    assert [products.share_at(flop) for flop in (1e3, 2e6, 2e7, 2e8, 2e9, 1e12)] == pytest.approx(
        [0.5, 0.5, 0.625, 0.75, 1.0, 1.0]
    )
    assert Products(1e9).seconds(2e9) == 2.0


def test_fp32_products_run_as_tf32_where_the_profile_says_so() -> None:
    tf32 = replace(HARDWARE, uses_tf32=True)
    assert tf32.products("fp32") == Products(8e9)
    assert tf32.products("fp16") == Products(8e9)  # no speed of its own
    assert tf32.products("bf16") == HARDWARE.bf16


def test_elements_count_where_they_take_longer_than_the_bytes() -> None:
    fp32 = torch.float32
    assert seconds("aten._softmax.default", 100, fp32, fp32) == pytest.approx(100**2 / 1e8)
    assert seconds("aten.exp.default", 100, fp32, fp32) == pytest.approx(8 * 100**2 / 1e9)


def test_of_a_table_the_rows_that_are_updated_count() -> None:
    shapes = {"table": (100_000, 8), "ids": (50,), "sums": (50, 8), "new": (100_000, 8)}
    tensors = {name: LogicalTensor(name, shape, torch.float32) for name, shape in shapes.items()}
    args = (Ref("table"), Ref("ids"), Ref("sums"))
    op = Op("new", "flow.update_rows", args, (), outputs=("new",), module="net")
    ins = [shapes[arg.name] for arg in args]
    assert op_seconds(op, ins, [shapes["new"]], tensors, HARDWARE) - START_S == pytest.approx(4e-5)


def test_products_of_heads_have_a_speed_of_their_own() -> None:
    shapes = {"x": (4, 100, 100), "y": (4, 100, 100), "z": (4, 100, 100)}
    tensors = {name: LogicalTensor(name, shape, torch.float32) for name, shape in shapes.items()}
    op = Op(
        "z",
        "aten.bmm.default",
        (Ref("x"), Ref("y")),
        (),
        outputs=("z",),
        module="net",
        phase=BACKWARD,
    )
    one, slow = (
        op_seconds(op, [shapes["x"]] * 2, [shapes["z"]], tensors, hardware) - START_S
        for hardware in (HARDWARE, replace(HARDWARE, batched_share=0.25))
    )
    assert slow / one == pytest.approx(4)


@pytest.mark.parametrize(
    ("dtype", "out", "num_bytes"),
    [
        (torch.float32, torch.float32, 8),
        (torch.bfloat16, torch.bfloat16, 4),
        (torch.float32, torch.bfloat16, 6),
    ],
    ids=["fp32", "bf16", "a cast"],
)
def test_an_elementwise_op_takes_the_bytes_that_it_reads_and_writes(
    dtype: torch.dtype, out: torch.dtype, num_bytes: int
) -> None:
    found = seconds("aten.relu.default", 100, dtype, out)
    assert found == pytest.approx(num_bytes * 100**2 / 1e9)


def test_a_bias_of_its_own_pass_reads_and_writes_the_product_once_more() -> None:
    shapes = {"bias": (100,), "x": (50, 1000), "y": (1000, 100), "z": (50, 100)}
    tensors = {name: LogicalTensor(name, shape, torch.float32) for name, shape in shapes.items()}
    reads = [Ref(name) for name in ("bias", "x", "y")]
    op = Op(
        "z", "aten.addmm.default", tuple(reads), (), outputs=("z",), module="net", phase=FORWARD
    )
    ins = [shapes[ref.name] for ref in reads]
    one, apart = (
        op_seconds(op, ins, [shapes["z"]], tensors, hardware)
        for hardware in (HARDWARE, replace(HARDWARE, bias_apart=True))
    )
    assert apart - one == pytest.approx(2 * 4 * 50 * 100 / 1e9 + START_S)


def test_what_a_product_writes_beyond_a_cube_is_written_behind_it() -> None:
    """A short inner dim: 8 times the output of the cube of as many multiplications."""
    shapes = {"x": (256, 8), "y": (8, 256), "z": (256, 256)}
    tensors = {name: LogicalTensor(name, shape, torch.float32) for name, shape in shapes.items()}
    op = Op(
        "z",
        "aten.mm.default",
        (Ref("x"), Ref("y")),
        (),
        outputs=("z",),
        module="net",
        phase=FORWARD,
    )
    one, behind = (
        op_seconds(op, [shapes["x"], shapes["y"]], [shapes["z"]], tensors, hardware)
        for hardware in (HARDWARE, replace(HARDWARE, writes_behind=True))
    )
    cube = round((256 * 8 * 256) ** (2 / 3))
    assert behind - one == pytest.approx(4 * (256**2 - cube) / 1e9)


def test_a_cube_writes_what_its_curve_knows() -> None:
    plain, behind = HARDWARE, replace(HARDWARE, writes_behind=True)
    tensors = {name: LogicalTensor(name, (100, 100), torch.float32) for name in "xyz"}
    op = Op(
        "z",
        "aten.mm.default",
        (Ref("x"), Ref("y")),
        (),
        outputs=("z",),
        module="net",
        phase=FORWARD,
    )
    one, other = (
        op_seconds(op, [(100, 100)] * 2, [(100, 100)], tensors, h) for h in (plain, behind)
    )
    assert one == pytest.approx(other)


def test_a_product_computes_whole_tiles_but_not_of_fewer_columns() -> None:
    """There are kernels with smaller tiles for these."""
    tiled = replace(HARDWARE, tile=64, memory_bytes_per_s=1e15)

    def took(columns: int) -> float:
        shapes = {"x": (2, 640, 32), "y": (2, 32, columns), "z": (2, 640, columns)}
        tensors = {
            name: LogicalTensor(name, shape, torch.float32) for name, shape in shapes.items()
        }
        op = Op(
            "z",
            "aten.bmm.default",
            (Ref("x"), Ref("y")),
            (),
            outputs=("z",),
            module="net",
            phase=FORWARD,
        )
        return op_seconds(op, [shapes["x"], shapes["y"]], [shapes["z"]], tensors, tiled)

    assert took(65) == took(96) == took(128) < took(129) == took(192)
    assert took(8) < took(32) < took(64) < took(65)


def test_a_view_takes_nothing() -> None:
    assert seconds("aten.t.default", 100, torch.float32, torch.float32) == -START_S


@pytest.mark.parametrize(("phase", "share"), [(BACKWARD, 0.97), (WEIGHT_GRAD, 0.9)])
def test_a_product_of_backward_is_slower_than_one_of_forward(phase: str, share: float) -> None:
    fp32 = torch.float32
    forward = seconds("aten.mm.default", 512, fp32, fp32)
    gradient = seconds("aten.mm.default", 512, fp32, fp32, phase)
    assert gradient == pytest.approx(forward / share)


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "times"),
    [
        pytest.param(3, 1, torch.float32, 2.25, id="3 x 3"),
        pytest.param(1, 1, torch.float32, 1.0, id="1 x 1"),
        pytest.param(3, 2, torch.float32, 1.0, id="every other place"),
        pytest.param(3, 1, torch.bfloat16, 1.0, id="narrow"),
    ],
)
def test_small_convolutions_take_fewer_multiplications_than_counted(
    size: int, stride: int, dtype: torch.dtype, times: float
) -> None:
    side = 64 // stride
    shapes = {"x": (8, 64, 64, 64), "w": (64, 64, size, size), "y": (8, 64, side, side)}
    tensors = {name: LogicalTensor(name, shape, dtype) for name, shape in shapes.items()}
    pairs = [(stride,) * 2, (size // 2,) * 2, (1, 1)]
    args = (Ref("x"), Ref("w"), None, *pairs, False, (0, 0), 1)
    op = Op("y", "aten.convolution.default", args, (), outputs=("y",))
    taken = [
        op_seconds(op, [shapes["x"], shapes["w"]], [shapes["y"]], tensors, hardware) - START_S
        for hardware in (HARDWARE, replace(HARDWARE, winograd=2.25))
    ]
    assert taken[0] / taken[1] == pytest.approx(times)


def test_a_hash_of_many_small_ops_takes_its_way_through_memory_on_a_cpu() -> None:
    """120 bytes an element at 1e9 a second, and the byte that is made."""
    op = Op(
        "z",
        "flow.dropout_mask",
        (Ref("draw"), 0, "z", (1000,), 0.1),
        (),
        outputs=("z",),
        module="net",
    )
    tensors = {
        "draw": LogicalTensor("draw", (), torch.int64),
        "z": LogicalTensor("z", (1000,), torch.bool),
    }
    cpu, gpu = (
        op_seconds(op, [()], [(1000,)], tensors, replace(HARDWARE, device=device)) - START_S
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
    assert op_flops(forward, held, [(100, 32)]) == 2 * 50 * 16 * 32
    both = [(100, 16), (4, 16, 32)]
    assert op_flops(backward, [*held, (100, 32)], both) == 2 * 2 * 50 * 16 * 32
    assert op_flops(backward, [*held, (100, 32)], [None, both[1]]) == 2 * 50 * 16 * 32


def test_a_transposed_convolution_multiplies_what_it_reads() -> None:
    """3 channels of 4 x 4 to 5 of 8 x 8, kernels of 2 x 2: each number meets 5 x 4 weights."""
    args = (Ref("x"), Ref("w"), None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    op = Op("y", "aten.convolution.default", args, (), outputs=("y",))
    found = op_flops(op, [(1, 3, 4, 4), (3, 5, 2, 2)], [(1, 5, 8, 8)])
    assert found == 2 * 3 * 16 * 5 * 4
