"""What is installed is what is in the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_models_know_nothing_of_the_engine() -> None:
    kept = r"flowrun\.engine\.(ops\.nn\.document_op|torch_internals)\b"  # know no engine either
    for file in (ROOT / "models").rglob("*.py"):
        assert "flowrun.engine" not in re.sub(kept, "", file.read_text()), file
    text = (ROOT / "engine" / "ops" / "nn" / "document_op.py").read_text()
    text = text.replace("from flowrun.engine.torch_internals import", "")
    text += (ROOT / "engine" / "torch_internals.py").read_text()
    assert "import flowrun" not in text and "from flowrun" not in text


def test_the_engine_knows_nothing_of_the_launcher() -> None:
    for file in (ROOT / "engine").rglob("*.py"):
        assert "flowrun.launcher" not in file.read_text(), file


def test_collectives_are_named_in_one_file() -> None:
    users = [
        file.relative_to(ROOT).as_posix()
        for top in ("engine", "launcher", "models")
        for file in (ROOT / top).rglob("*.py")
        if "dist.all_reduce" in file.read_text() or "all_to_all_single" in file.read_text()
    ]
    assert users == ["engine/runtime/transport/collectives.py"]
