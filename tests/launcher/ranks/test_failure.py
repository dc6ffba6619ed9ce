from flowrun.engine.runtime.drivers.distributed import LostPeer
from flowrun.launcher.ranks.failure import describe


def test_what_gloo_guesses_is_left_out() -> None:
    gloo = "RuntimeError: [/a/pair.cc:537] Read error: Closed. This is typically caused by"
    said = describe(LostPeer("rank 0, actor a", gloo), rank=0)
    assert (said.where, said.problem) == ("rank 0, actor a", "RuntimeError: Read error: Closed.")
