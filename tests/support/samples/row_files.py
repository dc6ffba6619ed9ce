"""Files of rows, a line of JSON each."""

import json
from pathlib import Path
from typing import Any


def write_rows(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / name)
