from flowrun.engine.cost.fusion import COMPILED, HANDWRITTEN, Fusion, kernels
from flowrun.engine.ir.graph import Op, Ref


def op(name: str, target: str, *reads: str) -> Op:
    return Op(name, f"aten.{target}", tuple(map(Ref, reads)), (), outputs=(name,))


def names(
    ops: list[Op], kept: str, sizes: dict[str, int] | None = None, fusion: Fusion = COMPILED
) -> list[tuple[str, ...]]:
    found = kernels(ops, [kept], lambda op: (sizes or {}).get(op.name, 8), fusion)
    return [tuple(each.name for each in kernel.ops) for kernel in found]


def test_a_chain_of_elementwise_ops_reads_what_enters_and_writes_what_leaves() -> None:
    ops = [
        op("a", "add.Tensor", "x", "y"),
        op("b", "relu.default", "a"),
        op("c", "mul.Tensor", "b", "x"),
    ]
    (kernel,) = kernels(ops, ["c"], lambda op: 8)
    assert (kernel.reads, kernel.writes) == (("x", "y"), ("c",))


def test_what_a_product_reads_too_is_written() -> None:
    ops = [
        op("a", "relu.default", "x"),
        op("b", "sigmoid.default", "a"),
        op("m", "mm.default", "a", "w"),
    ]
    chain, product = kernels(ops, ["b", "m"], lambda op: 8)
    assert (chain.reads, chain.writes) == (("x",), ("a", "b"))
    assert product.reads == ("a", "w")


def test_a_chain_does_not_reach_around_a_product() -> None:
    """a feeds the product m, b reads both: b in a's kernel would wait for itself."""
    ops = [
        op("a", "relu.default", "x"),
        op("m", "mm.default", "a", "w"),
        op("b", "add.Tensor", "a", "m"),
    ]
    assert names(ops, "b") == [("a",), ("m",), ("b",)]


def test_ops_over_unlike_numbers_of_elements_are_kernels_of_their_own() -> None:
    ops = [op("a", "relu.default", "x"), op("b", "add.Tensor", "a", "y")]
    assert names(ops, "b", {"a": 2}) == [("a",), ("b",)]
    assert names(ops, "b") == [("a", "b")]


def test_a_view_between_two_ops_is_no_kernel() -> None:
    ops = [op("a", "relu.default", "x"), op("v", "t.default", "a"), op("b", "relu.default", "v")]
    (kernel,) = kernels(ops, ["b"], lambda op: 8)
    assert (kernel.reads, kernel.writes) == (("x",), ("b",))


def test_a_handwritten_softmax_takes_what_masks_before_it_and_no_dropout_behind() -> None:
    ops = [
        op("mask", "add.Tensor", "x", "m"),
        op("p", "_softmax.default", "mask"),
        op("dropped", "mul.Tensor", "p", "kept"),
    ]
    assert names(ops, "dropped") == [("mask", "p", "dropped")]
    assert names(ops, "dropped", fusion=HANDWRITTEN) == [("mask", "p"), ("dropped",)]


def test_a_handwritten_gradient_of_a_softmax_takes_what_masks_behind_it() -> None:
    ops = [
        op("dp", "mul.Tensor", "dy", "kept"),
        op("dx", "_softmax_backward_data.default", "dp", "p"),
        op("masked", "mul.Tensor", "dx", "m"),
    ]
    assert names(ops, "masked") == [("dp", "dx", "masked")]
    assert names(ops, "masked", fusion=HANDWRITTEN) == [("dp",), ("dx", "masked")]


def test_a_handwritten_norm_is_a_kernel_of_its_own() -> None:
    ops = [
        op("sum", "add.Tensor", "x", "y"),
        op("n", "native_layer_norm.default", "sum"),
        op("half", "mul.Tensor", "n", "s"),
    ]
    assert names(ops, "half") == [("sum", "n", "half")]
    assert names(ops, "half", fusion=HANDWRITTEN) == [("sum",), ("n",), ("half",)]
