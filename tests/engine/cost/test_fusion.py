import pytest

from flowrun.engine.cost.fusion import COMPILED, HANDWRITTEN, FusedKernel, Fusion, kernels
from flowrun.engine.ir.graph import Op, Ref


def fused(
    text: str, kept: str, sizes: dict[str, int] | None = None, fusion: Fusion = COMPILED
) -> list[FusedKernel]:
    """Kernels of ops `name = target reads; …`, of 8 elements each where sizes say no other."""
    lines = [line.replace("=", "").split() for line in text.split(";")]
    ops = [
        Op(name, f"aten.{target}", tuple(map(Ref, reads)), (), outputs=(name,))
        for name, target, *reads in lines
    ]
    return kernels(ops, kept.split(), lambda op: (sizes or {}).get(op.name, 8), fusion)


def names(text: str, kept: str, **more: object) -> list[str]:
    return [" ".join(op.name for op in kernel.ops) for kernel in fused(text, kept, **more)]


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("a = add.Tensor x y; b = relu.default a; c = mul.Tensor b x", ("x", "y"), ("c",)),
        ("a = relu.default x; v = t.default a; c = relu.default v", ("x",), ("c",)),
    ],
    ids=["elementwise ops", "a view between two, which is no kernel"],
)
def test_a_chain_reads_what_enters_and_writes_what_leaves(
    text: str, reads: tuple[str, ...], writes: tuple[str, ...]
) -> None:
    (kernel,) = fused(text, "c")
    assert (kernel.reads, kernel.writes) == (reads, writes)


def test_what_a_product_reads_too_is_written() -> None:
    text = "a = relu.default x; b = sigmoid.default a; m = mm.default a w"
    chain, product = fused(text, "b m")
    assert (chain.reads, chain.writes) == (("x",), ("a", "b"))
    assert product.reads == ("a", "w")


def test_a_chain_does_not_reach_around_a_product() -> None:
    """a feeds the product m, b reads both: b in a's kernel would wait for itself."""
    text = "a = relu.default x; m = mm.default a w; b = add.Tensor a m"
    assert names(text, "b") == ["a", "m", "b"]


def test_ops_over_unlike_numbers_of_elements_are_kernels_of_their_own() -> None:
    text = "a = relu.default x; b = add.Tensor a y"
    assert names(text, "b", sizes={"a": 2}) == ["a", "b"]
    assert names(text, "b") == ["a b"]


HAND = {
    "a softmax takes what masks before it and no dropout behind": (
        "mask = add.Tensor x m; p = _softmax.default mask; dropped = mul.Tensor p kept",
        ["mask p", "dropped"],
    ),
    "a gradient of a softmax takes what masks behind it": (
        "dp = mul.Tensor dy kept; dx = _softmax_backward_data.default dp p; end = mul.Tensor dx m",
        ["dp", "dx end"],
    ),
    "a norm is a kernel of its own": (
        "sum = add.Tensor x y; n = native_layer_norm.default sum; half = mul.Tensor n s",
        ["sum", "n", "half"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), HAND.values(), ids=HAND)
def test_handwritten_kernels_take_less_than_compiled_ones(text: str, expected: list[str]) -> None:
    last = expected[-1].split()[-1]
    assert names(text, last) == [" ".join(expected)]
    assert names(text, last, fusion=HANDWRITTEN) == expected
