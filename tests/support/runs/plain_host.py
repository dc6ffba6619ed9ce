"""A host as it describes itself to the others, with nothing that differs."""

from typing import Any

from flowrun.launcher.supervise.hosts.words import Host


def plain_host(name: str, **fields: Any) -> Host:
    usual: dict[str, Any] = {"node_rank": None, "recipe": {}, "plan": "p", "planned": 2}
    usual |= {"start": (0, ""), "quorum": 0, "epoch": 0}
    usual |= {"versions": {"torch": "2.13"}, "folder": "/shared"}
    return Host(name=name, **(usual | fields))
