from types import SimpleNamespace

import pytest
import torch

from flowrun.launcher.ranks import worker


def test_a_rank_keeps_near_the_device_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []

    def found(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=1, pci_bus_id=75 + device.index, pci_device_id=0)

    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(worker, "pin_near", taken.append)
    device = worker.device_of_rank("cuda")
    assert device == torch.device("cuda", 1) and taken == ["0001:4c:00.0", device]
