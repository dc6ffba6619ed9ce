"""Without a pin the search finds what experts do, where sizes are such that they would do it; or
something that costs less.
"""

from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Auto
from support.plans.searches import search_of, words

GPT3 = (
    "model=gpt3_175b",
    "data.length=2048",
    "hardware=dgx_a100",
    "placement.axes.tensor=8",
    "train.batch_size=1",
    "precision.dtype=bf16",
)
V100 = ("hardware=v100_cluster", "placement.axes.data=8")
FACES = (
    *("model=insightface_r50", "model.blocks=[1,1,1,1]", "data.size=112", "data.classes=1000000"),
    "train.batch_size=1024",
)
CLICKS = ("model.ids=400000000", "train.batch_size=16384", "data.samples=20000")  # 27 GB of tables
FEWER = ("model.ids=100000000", "train.batch_size=16384", "data.samples=20000")  # 7 GB
RESNET = (
    *("model=resnet50", "model.blocks=[1,1,1,1]", "data.size=224", "model.outputs=1000"),
    *("data.classes=1000", "train.batch_size=256"),
)


def test_a_gpt_of_large_blocks_gets_megatrons_columns_and_rows() -> None:
    """And its sequence parallelism: what it costs less than the pins of columns and rows alone."""
    bare, pinned = (search_of("gpt_tp", *GPT3, pins=pins) for pins in (False, True))
    for module, row in (("attn.qkv", "S(0)"), ("attn.proj", "S(1)"), ("mlp.fc1", "S(0)")):
        assert words(bare)[f"blocks.0.{module}.weight"] == row
    assert words(bare)["blocks.0.mlp.fc2.weight"] == "S(1)"
    assert bare.found.gap == 0.0 and bare.found.cost <= pinned.found.cost
    inferred = pinned.network.cost(pinned.inferred or ())[0]
    assert bare.seconds < 0.98 * inferred


def test_a_gpt_of_small_blocks_and_many_samples_is_data_parallel() -> None:
    """Its weights are less than its activations: no all-reduce of these is worth its while."""
    bare, pinned = (search_of("gpt_tp", pins=pins) for pins in (False, True))
    assert set(words(bare).values()) <= {"B", "S(0)"}
    assert words(bare)["blocks.0.mlp.fc1.weight"] == "B"
    assert bare.found.gap == 0.0 and bare.seconds <= pinned.seconds
    assert bare.seconds < pinned.network.cost(pinned.inferred or ())[0]


def test_a_million_faces_are_split_by_classes() -> None:
    layout = search_of("insightface_hybrid", *V100, *FACES, pins=False)
    pinned = search_of("insightface_hybrid", *V100, *FACES, pins=True)
    assert words(layout)["head.weight"] == "S(0)"
    assert layout.seconds <= pinned.seconds
    assert layout.seconds < 0.5 * layout.network.cost(layout.inferred or ())[0], "data parallel"


def test_large_tables_are_split() -> None:
    """Those that no rank can hold.  By columns: all look up all ids, an all-to-all brings each rank
    its samples' rows; but a column cannot be split by columns.
    """
    layout = search_of("wide_deep", *V100, *CLICKS, pins=False)
    pinned = search_of("wide_deep", *V100, *CLICKS, pins=True)
    assert words(layout)["deep.weight"] == "S(1)"
    assert words(layout)["wide.weight"] == "S(0)"
    assert layout.seconds <= pinned.seconds


def test_tables_that_fit_are_split_where_memory_counts() -> None:
    """To send ids and rows of gradients to all takes less time than two all-to-alls."""
    layout = search_of("wide_deep", *V100, *FEWER, pins=False)
    pinned = search_of("wide_deep", *V100, *FEWER, pins=True)
    assert words(layout)["deep.weight"] == "B"
    assert layout.seconds <= pinned.seconds
    weighed = search_of(
        "wide_deep", *V100, *FEWER, pins=False, auto=Auto(enabled=True, memory="slight")
    )
    assert (words(weighed)["deep.weight"], words(weighed)["wide.weight"]) == ("S(1)", "S(0)")


def test_a_resnet_stays_data_parallel() -> None:
    """Every convolution is of a rank's own samples; a few weights are gathered from shards, as
    under ZeRO 3, which costs a little less than to update them everywhere.
    """
    layout = search_of("resnet_dp", *V100, *RESNET, pins=False)
    options = layout.network.options
    convolutions = [
        options.rows[v][layout.found.choice[v]][0].outputs[0]
        for v, op in enumerate(options.ops)
        if op.target.startswith("aten.convolution.")
    ]
    assert len(convolutions) > 16 and set(convolutions) == {S(0)}
    data_parallel = layout.network.cost(layout.inferred or ())[0]
    assert 0.97 * data_parallel < layout.seconds <= data_parallel


def test_more_stages_need_few_more_tables() -> None:
    """Those of stages alike are the same arrays."""

    def arrays(stages: int) -> int:
        keys = ("model.depth=6", f"placement.stages={stages}")
        terms = search_of("gpt_hybrid", *keys, pins=True).network.terms
        return len({id(term.seconds) for term in terms})

    assert arrays(6) < 1.1 * arrays(3)
