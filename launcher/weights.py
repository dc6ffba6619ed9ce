"""python -m flowrun.launcher.weights FOLDER OTHER_FOLDER …: shards of several hosts, joined."""

from __future__ import annotations

import sys

from flowrun.launcher.store.weight_files import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
