"""What is installed is what is in the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


# what models may import of the engine, and what these may of each other: they know no engine either
OF_MODELS = ("ops/nn/document_op.py", "ops/nn/expert_op.py", "torch_internals.py")
NAMES = r"flowrun\.engine\.(errors|ops\.nn\.(document_op|expert_op)|torch_internals)\b"


def test_models_know_nothing_of_the_engine() -> None:
    files = [*(ROOT / "models").rglob("*.py"), *(ROOT / "engine" / name for name in OF_MODELS)]
    for file in files:
        assert "flowrun.engine" not in re.sub(NAMES, "", file.read_text()), file


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
