"""The page "From text to a model that answers": all that a reader types, with less to train."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.data.corpus.tokenizer import digest_ids
from support.runs.command import Command

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorial" / "5_text_to_chat.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
STEPS = {"llama.yaml": 12, "tune.yaml": 4}


def typed(place: Path, line: str) -> str:
    """Type a line of the page in a folder; return what it prints."""
    program, *words = shlex.split(line)
    if words[:1] == ["tokenizer"]:
        words += ["--from", str(Path(json.__file__).parent)]  # a part of the library
    if program == "python":
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout
    ended = Command(place, *words).end(within=280)
    assert (ended.status, ended.err) == (0, ""), line
    return ended.out


def test_what_the_page_says_runs(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, body in FILE.findall(text):
        (tmp_path / name).write_text(body)
    for name, steps in STEPS.items():
        recipe = yaml.safe_load((tmp_path / name).read_text())
        recipe["train"]["steps"] = steps
        if name == "llama.yaml":
            recipe["data"]["max_bytes"] = 200_000
            recipe["model"]["config"]["num_hidden_layers"] = 2
        (tmp_path / name).write_text(yaml.safe_dump(recipe))
    said = {
        line: typed(tmp_path, line) for part in SHELL.findall(text) for line in part.splitlines()
    }
    assert "it now writes:" in said["flowrun recipe=llama.yaml hydra.run.dir=runs/llama"]
    answer = next(out for line, out in said.items() if "--chat" in line)
    assert answer.strip()
    assert typed(tmp_path, "python look.py")
    assert digest_ids(str(tmp_path / "runs/llama/tokenizer")) == digest_ids(str(tmp_path / "bpe"))
    for run, folder in (("llama", "llama"), ("tune", "tuned")):
        same_logits(tmp_path / "runs" / run, tmp_path / folder)


def same_logits(run: Path, folder: Path) -> None:
    """The folder computes what the run's model does."""
    ids = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt").input_ids
    with pytest.MonkeyPatch.context() as here, torch.no_grad():
        here.chdir(run.parents[1])
        one = load_run(run).model(ids).logits
        other = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
