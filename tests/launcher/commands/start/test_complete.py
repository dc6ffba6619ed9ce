"""What bash offers behind TAB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrun.launcher.commands.start.complete import BASH, complete_line

COMMANDS = {"run": ["--multirun", "-m"], "plan": ["--level", "--save-recipe"], "bench": []}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flowrun pl", ["placement.", "plan"]),
        ("flowrun plan --", ["--level", "--save-recipe"]),
        ("flowrun --m", ["--multirun"]),
        ("flowrun plan recipe=mlp_h", ["recipe=mlp_hybrid"]),
        ("flowrun -m recipe=gpt_dp,gpt_hy", ["recipe=gpt_dp,gpt_hybrid"]),
        ("flowrun recipe=gpt_dp opt", ["optim.", "optim="]),
        ("flowrun recipe=gpt_dp launch.slurm.q", ["launch.slurm.qos="]),
        ("flowrun train.sav", ["train.save=", "train.save_aside=", "train.save_every="]),
        ("flowrun train.save=", ["train.save=false", "train.save=true"]),
        ("flowrun precision.dtype=b", ["precision.dtype=bf16"]),
        ("flowrun launch=v", ["launch=virtual"]),
        ("flowrun bench suite=peers_b", ["suite=peers_bf16"]),
        ("flowrun model.width.x", []),
        ("flowrun train.steps=", []),
    ],
)
def test_a_word_is_completed(line: str, found: list[str]) -> None:
    assert complete_line(line, COMMANDS) == found


@pytest.mark.parametrize(
    ("line", "replies"),
    [("flowrun recipe=mlp_h", ["mlp_hybrid"]), ("flowrun com", ["completion"])],
)
def test_the_script_answers_bash(tmp_path: Path, line: str, replies: list[str]) -> None:
    command = tmp_path / "flowrun"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flowrun.launcher.cli "$@"\n')
    command.chmod(0o755)
    ask = f'COMP_LINE="{line}" COMP_POINT={len(line)}; _flowrun; printf "%s\\n" "${{COMPREPLY[@]}}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{BASH}\n{ask}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (replies, "")
