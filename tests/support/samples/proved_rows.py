"""proved_rows: the families of ops whose rows were proved as they stand.

    python tests/support/samples/proved_rows.py           name the families that have changed since
    python tests/support/samples/proved_rows.py --write   prove those, then write all digests down

A digest is over the code of a family, that of the proof, and the calls of the family's samples;
docstrings, comments and the numbers that are drawn do not count.  Digests hold for one minor
release of torch: with another, all families count as changed.
"""

import argparse
import ast
import hashlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.simulated_ranks import OpSample
from support.samples.op_samples import all_samples

ROOT = Path(__file__).resolve().parents[3]
PROVED = Path(__file__).with_suffix(".json")
TORCH = ".".join(torch.__version__.split(".")[:2])
TEST = "tests/engine/ops/test_signatures.py"
PROOF = (
    *(f"engine/ir/{name}.py" for name in ("expansion", "graph", "placement", "sbp", "signature")),
    "engine/ops/registry.py",
    "engine/ops/proof/simulated_ranks.py",
    "tests/support/samples/absent_rows.py",
    "tests/support/samples/sample_values.py",
    "tests/support/samples/table_verdict.py",
)


@cache
def samples() -> tuple[OpSample, ...]:
    """Return all samples, in the order of their files."""
    return tuple(all_samples())


@cache
def _families() -> dict[str, str]:
    modules = (m for m in vars(registry).values() if inspect.ismodule(m) and hasattr(m, "OPS"))
    return {
        target: Path(str(m.__file__)).relative_to(ROOT).as_posix()
        for m in modules
        for target in m.OPS
    }


def family_of(target: str) -> str:
    """Return the file that has the rows of a target, from the root of the tree; "" if none has."""
    return _families().get(target, "")


def _code(file: Path) -> list[str]:
    """Return the lines of a file without docstrings, comments and blank lines."""
    text = file.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in left_out and line.strip() and not line.lstrip().startswith("#")
    ]


def _files_of(family: str, seen: set[str]) -> set[str]:
    """Return a family's file and those of engine/ops that it imports."""
    if family in seen or not (ROOT / family).is_file():
        return seen
    seen.add(family)
    for node in ast.walk(ast.parse((ROOT / family).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "flowrun.engine.ops"
        ):
            base = str(node.module).removeprefix("flowrun.").replace(".", "/")
            for name in (f"{base}.py", *(f"{base}/{alias.name}.py" for alias in node.names)):
                _files_of(name, seen)
    return seen


def _lines_of(given: OpSample) -> Iterator[str]:
    yield f"{given.label} {given.op} {given.op.kwargs}"
    for value in given.inputs:
        yield f"{tuple(value.shape)} {value.dtype} {value.stride()}"
    yield inspect.getsource(given.sound)


@cache
def digests() -> dict[str, str]:
    """Return family -> digest of all that the proof of its rows depends on."""
    proof = [line for name in PROOF for line in _code(ROOT / name)]
    targets = (*_families(), *(given.op.target for given in samples()))
    lines = {
        family: [line for name in sorted(_files_of(family, set())) for line in _code(ROOT / name)]
        for family in sorted({family_of(target) for target in targets})
    }
    for given in samples():
        lines[family_of(given.op.target)] += _lines_of(given)
    return {
        family: hashlib.sha256("\n".join([*proof, *own]).encode()).hexdigest()[:16]
        for family, own in lines.items()
    }


def is_recorded() -> bool:
    """Return whether digests of this release of torch are written down."""
    return bool(json.loads(PROVED.read_text())["torch"] == TORCH)


def changed_families() -> set[str]:
    """Return the families that were not proved as they stand, with this release of torch."""
    proved = json.loads(PROVED.read_text())["families"] if is_recorded() else {}
    return {family for family, digest in digests().items() if proved.get(family) != digest}


def main() -> int:
    """Name the families that have changed; with --write prove them and write digests down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    print("\n".join(sorted(changed_families())) or "all families are proved as they stand")
    if not write:
        return 0
    guard = f"{TEST}::test_every_family_is_proved_as_it_stands"
    command = [sys.executable, "-m", "pytest", "-q", "-x", TEST, "--deselect", guard]
    if status := subprocess.run(command, cwd=ROOT).returncode:
        return status
    PROVED.write_text(json.dumps({"torch": TORCH, "families": digests()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
