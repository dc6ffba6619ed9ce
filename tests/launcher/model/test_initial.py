import pytest
import torch

from flowrun.launcher.model.initial import Initial


def test_to_ask_whether_there_is_a_value_does_not_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    initial = Initial({"w": (torch.ones(2), torch.float64)})
    assert initial["w"].dtype == torch.float64
    monkeypatch.delattr(Initial, "__getitem__")
    assert "w" in initial
    assert "v" not in initial
