"""Communication as by hand: what each way of dividing the work sends, counted by the transport.

T: bytes of one micro-batch's activations between blocks.  A ring all-reduce over p ranks sends
2(p-1) times its tensor, a reduce-scatter or an all-gather p-1 times (design.md, section 6).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.boxing import ALL_REDUCE, EXCHANGE
from flowrun.engine.compile import Compilation
from flowrun.engine.hardware.network import Level
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE
from flowrun.engine.ir.module_path import unit_of
from support.layouts.grids import Layout, Run, example, strategy, task, virtual_run
from support.layouts.plain_loop import BLOCKS, CONTEXT, TINY_GPT, VOCABULARY, WIDTH, gpt

FP32 = 4
POSITIONS = TINY_GPT.micro_batch * CONTEXT
T = POSITIONS * WIDTH * FP32
BLOCK_WEIGHTS = (3 + 1 + 4 + 4) * WIDTH * WIDTH * FP32  # qkv, proj, fc1, fc2
BLOCK_NORMS = 4 * WIDTH * FP32
EMBEDDINGS = (VOCABULARY + CONTEXT) * WIDTH * FP32
HEAD, NORM = VOCABULARY * WIDTH * FP32, 2 * WIDTH * FP32
WEIGHTS = BLOCKS * (BLOCK_WEIGHTS + BLOCK_NORMS) + EMBEDDINGS + HEAD + NORM
ONE_MICRO_BATCH = gpt(samples=4, micro_batches=1)

Pair = tuple[Actor, str, str]


def pairs(plan: Plan) -> Iterator[Pair]:
    """Every tensor that moves: (actor that sends it, tensor before, tensor after)."""
    for actor in plan.actors:
        if isinstance(actor.work, BoxWork | TransferWork) and actor.kind != "receive":
            for move in actor.work.moves:
                yield actor, move.read, move.made


def sent(run: Run, steps: int, phase: str, unit: str | None = None) -> float:
    """Bytes that all ranks sent in one step, by actors of a phase; unit: that box for a block."""
    plan = run.plan
    graph = plan.graph
    actors = {
        actor.id
        for actor, _, made in pairs(plan)
        if actor.phase == phase and unit in (None, unit_of(graph.producer[made].module))
    }
    return sum(run.sent_bytes[actor] for actor in actors) / steps


# ---- tensor parallelism --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensor_2() -> Run:
    return virtual_run(TINY_GPT, Layout(tensor=2), 2)


@pytest.mark.parametrize("most", [0, POSITIONS * FP32, T])
def test_all_reduces_of_small_messages_are_exchanged(most: int) -> None:
    """Of the logarithms of sums, and of the activations."""
    layout, level = Layout(tensor=4), Level(exchange_bytes={4: most})
    base = strategy(TINY_GPT, layout)
    hardware = replace(base.hardware, levels=(level,))
    given = replace(base, hardware=hardware)
    planned = Compilation(task(TINY_GPT), example(TINY_GPT), given).training
    found = {}
    for actor in (actor for actor in planned.plan.actors if isinstance(actor.work, BoxWork)):
        message = sum(move.num_bytes for move in actor.work.moves)
        kind = actor.work.step.kind
        if kind not in (ALL_REDUCE, EXCHANGE):
            continue
        assert (kind == EXCHANGE) == (message <= most), actor.name
        assert actor.sent_bytes == {EXCHANGE: 4 * 3, ALL_REDUCE: 2 * 3}[kind] * message
        found[message] = kind
    assert found.keys() >= {POSITIONS * FP32, T}


@pytest.mark.parametrize("block", range(1, BLOCKS))
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_a_block_sends_two_all_reduces_each_way(tensor_2: Run, block: int, phase: str) -> None:
    all_reduce = 2 * (2 - 1) * T
    found = sent(tensor_2, 2, phase, f"blocks.{block}")
    assert found == 2 * all_reduce * TINY_GPT.micro_batches


def test_the_first_block_sends_one_all_reduce_less(tensor_2: Run) -> None:
    """Below it are weights alone: their gradients are summed once a step instead.  Forward, it
    reads the embedding too, which is split by rows.
    """
    all_reduce = 2 * (2 - 1) * T
    assert sent(tensor_2, 2, FORWARD, "blocks.0") == 3 * all_reduce * TINY_GPT.micro_batches
    assert sent(tensor_2, 2, FORWARD, "norm") == 0
    assert sent(tensor_2, 2, BACKWARD, "blocks.0") == all_reduce * TINY_GPT.micro_batches


def test_tensor_parallelism_moves_no_weight(tensor_2: Run) -> None:
    weights = tensor_2.plan.graph.variable_of
    assert not [read for _, read, _ in pairs(tensor_2.plan) if read in weights]


def test_tensor_parallelism_sums_only_gradients_of_whole_weights_below_the_blocks(
    tensor_2: Run,
) -> None:
    moved = {read for actor, read, _ in pairs(tensor_2.plan) if actor.phase == UPDATE}
    below = ("embed.wte.weight", "embed.wpe.weight", "blocks.0.ln1.weight", "blocks.0.ln1.bias")
    assert moved == {"loss/mean", *(f"grad/{name}" for name in below)}


def test_the_loss_sends_one_statistic_of_each_position(tensor_2: Run) -> None:
    """The logarithm of the sum of exponentials, forward; backward has it."""
    statistic = 2 * (2 - 1) * POSITIONS * FP32
    assert sent(tensor_2, 2, FORWARD, "loss") == statistic * TINY_GPT.micro_batches
    assert sent(tensor_2, 2, BACKWARD, "loss") == 0


def test_nothing_as_large_as_the_logits_moves(tensor_2: Run) -> None:
    tensors = tensor_2.plan.graph.tensors
    micro = [t for a, t, _ in pairs(tensor_2.plan) if a.phase != UPDATE]
    assert max(tensors[name].num_bytes for name in micro) == T < POSITIONS * VOCABULARY * FP32


# ---- data parallelism and ZeRO -------------------------------------------------------------------


def test_data_2_sends_one_all_reduce_of_the_gradients_a_step() -> None:
    """And scalars, once a step: the loss, and the number of targets."""
    run = virtual_run(TINY_GPT, Layout(data=2), 2)
    scalar = 2 * (2 - 1) * FP32
    assert sent(run, 2, UPDATE) == 2 * (2 - 1) * WEIGHTS + scalar
    assert sent(run, 2, "weights") == scalar
    assert sent(run, 2, FORWARD) == 0
    assert sent(run, 2, BACKWARD) == 0


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_send_the_bytes_of_data_parallelism(zero: int) -> None:
    plain = virtual_run(ONE_MICRO_BATCH, Layout(data=2), 2)
    sharded = virtual_run(ONE_MICRO_BATCH, Layout(data=2, zero=zero), 2)
    assert any("all_gather" in a.name for a in sharded.plan.actors)
    assert sum(sharded.sent_bytes.values()) == sum(plain.sent_bytes.values())


def test_zero_3_sends_half_as_much_again() -> None:
    """Weights are gathered twice, gradients scattered once: 3 times T for 2.

    Not the embeddings, which backward does not read, nor what is too small to shard.
    """
    plain = virtual_run(ONE_MICRO_BATCH, Layout(data=2), 2)
    sharded = virtual_run(ONE_MICRO_BATCH, Layout(data=2, zero=3), 2)
    more = sum(sharded.sent_bytes.values()) - sum(plain.sent_bytes.values())
    assert more == 2 * (BLOCKS * BLOCK_WEIGHTS + HEAD)
    assert sent(plain, 2, UPDATE, "head") == 2 * HEAD
    assert sum(sent(sharded, 2, phase, "head") for phase in (FORWARD, BACKWARD)) == 3 * HEAD


# ---- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_send_boundary_activations_and_their_gradients_only(stages: int) -> None:
    run = virtual_run(TINY_GPT, Layout(stages=stages), 2)
    for phase in (FORWARD, BACKWARD):
        assert sent(run, 2, phase) == (stages - 1) * T * TINY_GPT.micro_batches
    assert sent(run, 2, UPDATE) == 0


def test_clipping_sends_a_scalar_to_stage_0_and_one_back() -> None:
    run = virtual_run(TINY_GPT, Layout(stages=4, clip_norm=0.5), 2)
    assert sent(run, 2, UPDATE) == (4 - 1) * 2 * FP32
