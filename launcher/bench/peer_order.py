"""The order of a peer's rank, as a file.  It imports no torch: the bench itself stays small."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from flowrun.launcher.bench.suite import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOrder:
    """overrides, config_dir: of the recipe.  compiled: torch.compile is to be used.  meet: a file
    that does not exist yet, by which the ranks meet.
    """

    overrides: tuple[str, ...]
    peer: Peer
    compiled: bool
    meet: str
    config_dir: str | None = None

    def to_json(self) -> str:
        """Return the text that from_json reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> PeerOrder:
        """Read what to_json wrote."""
        tree = json.loads(text)
        peer: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in tree["peer"].items()
        }
        return PeerOrder(**{**tree, "overrides": tuple(tree["overrides"]), "peer": Peer(**peer)})
