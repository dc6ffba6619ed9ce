"""What one GPU shows of several ranks.  Run it first wherever a GPU is at hand.

python tests/gpu/one_device.py [--minutes 6] [--json build/one_device.json] [ROW ...]

A rank trains while kernels spin on the device, as a message of NCCL does whose peer has not come.
Then ranks share the GPU, which takes NCCL 2.30 or later (`LD_PRELOAD=…/libnccl.so.2` where torch
has an older one): their losses are those of the CPU, and a rank that is killed or stopped is named.
ROW: words of the rows' names; none: all.  What the machine lacks is skipped, by name.  The exit
status is the number of rows that fail.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flowrun.engine.runtime.kernels.packed_attention import flash_kernels, has_flash_3

NCCL = (2, 30)
STEPS, HELD_S, ROW_S = 4, 10.0, 75.0
SPINS = ((0, "LAZY"), (1, "LAZY"), (8, "LAZY"), (33, "LAZY"), (33, "EAGER"))  # streams, loading


@dataclass(frozen=True)
class Training:
    """A run on the GPU.  words: of the recipe; layout: what the CPU's run leaves out.

    strike: the signal that a rank gets after its third step.  ends: status of the run, and what it
    prints; else its losses are compared.
    """

    name: str
    words: str
    layout: str = ""
    ranks: int = 2
    strike: int = 0
    ends: tuple[int, str] = (0, "")


GPT = "recipe=gpt_hybrid train.steps=3 train.batch_size=8 train.micro_batches=4"
DEEP = f"{GPT} model.depth=20"
ONE = "placement.axes.tensor=1 placement.stages=1"
LONG = "recipe=mlp_hybrid train.steps=600"
TRAININGS = (
    Training("stages 2", GPT, "placement.stages=2"),
    Training("stages 2, chunks 10", DEEP, "placement.stages=2 placement.chunks=10"),
    Training("data 2", GPT, "placement.axes.data=2"),
    Training("tensor 2", GPT, "placement.axes.tensor=2"),
    Training("tensor 2, blocking", GPT, "placement.axes.tensor=2 engine.blocking=[tensor]"),
    *(
        Training(f"ZeRO {n}", GPT, f"placement.axes.data=2 zero.axis=data zero.stage={n}")
        for n in (1, 2, 3)
    ),
    Training("experts 2", "recipe=moe_ep train.steps=3"),
    Training("mirrored view", "recipe=mlp_data_parallel view=mirrored train.steps=3"),
    Training("killed", LONG, strike=signal.SIGKILL, ends=(1, "killed by SIGKILL")),
    Training("killed, restarts", LONG, "launch.restarts=1", strike=signal.SIGKILL),
    Training(
        "stopped", LONG, "launch.hang_s=5", strike=signal.SIGSTOP, ends=(1, "stopped by a signal")
    ),
    Training("data 2, stages 2", GPT, "placement.axes.data=2 placement.stages=2", ranks=4),
    Training("stages 2, compiled", GPT, "placement.stages=2 engine.compiler=inductor"),
)


def spin(streams: int) -> float:
    """Train a rank while kernels of 8 blocks, two in line, wait on each stream; return seconds."""
    import triton  # type: ignore[import-not-found]
    from triton import language as tl

    from flowrun.engine.runtime.drivers.distributed import DistributedRank
    from flowrun.engine.runtime.transport.links import Links
    from support.layouts.grids import Layout, compiled, initial
    from support.layouts.plain_loop import TINY_GPT

    @triton.jit  # type: ignore[untyped-decorator]
    def wait(flag, out):  # type: ignore[no-untyped-def]
        seen = tl.load(flag, volatile=True)
        while seen == 0:
            seen = tl.load(flag, volatile=True)
        tl.store(out + tl.program_id(0), seen)

    device = torch.device("cuda", 0)
    flag = torch.ones(1, dtype=torch.int32).pin_memory()
    out = torch.zeros(8, dtype=torch.int32, device=device)
    wait[(8,)](flag, out, num_warps=16)  # compiled
    with closing(Links(0, device)) as links:
        plan, values = compiled(TINY_GPT, Layout()).plan, initial(TINY_GPT)
        rank = DistributedRank(plan, 0, TINY_GPT.rows, values, device, links)
        torch.cuda.synchronize()
        flag.fill_(0)
        for stream in [torch.cuda.Stream(device) for _ in range(streams)]:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    wait[(8,)](flag, out, num_warps=16)
        release = threading.Timer(HELD_S, flag.fill_, (1,))
        release.start()
        begin = time.perf_counter()
        rank.run(STEPS)
        seconds = time.perf_counter() - begin
        release.cancel()
        flag.fill_(1)
        torch.cuda.synchronize()
    return seconds


def see_spin(streams: int, loading: str) -> str:
    """Return a row's verdict, of a process of its own."""
    command = [sys.executable, __file__, "--spin", str(streams)]
    env = {**os.environ, "CUDA_MODULE_LOADING": loading}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ROW_S)
    if done.returncode:
        return f"FAULT: {done.stderr[-300:]!r}"
    seconds = float(done.stdout.split()[-1])
    step = f"{1000 * seconds / STEPS:.1f} ms a step"
    return f"free, {step}" if seconds < HELD_S else f"FAULT: waits for what spins, {step}"


def train(words: str, strike: int = 0) -> tuple[int, str, list[float]]:
    """Return the status of a run, what it prints, and its losses."""
    with tempfile.TemporaryDirectory() as place:
        log, folder = Path(place, "log"), Path(place, "run")
        plain = ("eval.batches=0", "engine.check_capture=false", f"hydra.run.dir={folder}")
        command = [sys.executable, "-m", "flowrun.launcher.cli", *words.split(), *plain]
        with log.open("w") as out:
            run = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, cwd=place
            )
        try:
            while strike and len(losses(folder)) < 3 and run.poll() is None:
                time.sleep(0.05)
            if strike and run.poll() is None:
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
                os.kill(int(children[-1]), strike)
            run.wait(ROW_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        return run.returncode, log.read_text(errors="replace"), losses(folder)


def losses(folder: Path) -> list[float]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


@cache
def of_the_cpu(words: str) -> tuple[int, str, list[float]]:
    return train(f"{words} launch.device=cpu")


def see_training(one: Training) -> str:
    alone = ONE if "gpt" in one.words else ""
    seen = train(f"{one.words} {alone} {one.layout} launch.device=cuda", one.strike)
    return judge(one, seen, one.ends[0] or of_the_cpu(f"{one.words} {alone}"))


def see_documents() -> str:
    """Compare FlashAttention 3 with 2 on documents, as a rank does."""
    with warnings.catch_warnings(record=True) as said:
        name = flash_kernels(torch.device("cuda", 0), torch.bfloat16, 64).name
    return f"FAULT: {said[0].message}" if said else name


def judge(one: Training, seen: tuple[int, str, list[float]], cpu: Any) -> str:
    """Return the verdict of a run."""
    status, printed, found = seen
    if status != one.ends[0] or one.ends[1] not in printed:
        return f"FAULT: status {status}: {printed[-400:]!r}"
    if one.ends[0]:
        return "named"
    off = [abs(a / b - 1) for a, b in zip(found, cpu[2], strict=False)]
    if not off or len(found) != len(cpu[2]):
        return f"FAULT: {len(found)} losses, the CPU {len(cpu[2])}: {cpu[1][-200:]!r}"
    most = max(off[:3], key=lambda x: (x != x, x))  # later ones carry the rounding of all before
    return f"{'same' if most < 1e-5 else 'FAULT: other losses'}, to {most:.1e}"


def lacks(ranks: int, gpus: int, nccl: tuple[int, ...]) -> str:
    """Return why ranks cannot train here; "" if they can."""
    if ranks <= gpus or nccl >= NCCL:
        return ""
    here, needed = (".".join(map(str, version)) for version in (nccl, NCCL))
    return f"skipped: {ranks} ranks on {gpus} GPU need NCCL {needed}, preloaded; here is {here}"


def see(wanted: Sequence[str], minutes: float, nccl: tuple[int, ...]) -> list[dict[str, Any]]:
    end, gpus = time.monotonic() + 60 * minutes, torch.cuda.device_count()
    rows: list[tuple[str, str, Callable[[], str]]] = [
        (f"spin on {n}, {how.lower()}", "", partial(see_spin, n, how)) for n, how in SPINS
    ]
    lack = "" if has_flash_3() else "skipped: flash_attn_3 is not installed"
    rows.append(("documents", lack, see_documents))
    rows += [(t.name, lacks(t.ranks, gpus, nccl), partial(see_training, t)) for t in TRAININGS]
    table: list[dict[str, Any]] = []
    for name, lack, look in rows:
        if wanted and not any(word in name for word in wanted):
            continue
        begin = time.monotonic()
        try:
            verdict = lack or ("left out: no time" if begin > end else look())
        except subprocess.TimeoutExpired:
            verdict = f"FAULT: no end within {ROW_S:g} s"
        seconds = time.monotonic() - begin
        table.append({"row": name, "seconds": round(seconds, 1), "verdict": verdict})
        print(f"{name:20} {seconds:6.1f} s  {verdict}", flush=True)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--json", type=Path, default=Path("build/one_device.json"))
    parser.add_argument("--spin", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("Torch sees no GPU here: nothing was tried.")
        return 0
    if given.spin is not None:
        print(spin(given.spin))
        return 0
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("NCCL_MAX_CTAS", "8")  # so that four ranks find room
    nccl: tuple[int, ...] = torch.cuda.nccl.version()
    versions = [torch.cuda.get_device_name(), torch.__version__, ".".join(map(str, nccl))]
    print("{}, torch {}, NCCL {}".format(*versions), flush=True)
    table = see(given.rows, given.minutes, nccl)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({"versions": versions, "rows": table}, indent=1))
    return sum(row["verdict"].startswith("FAULT") for row in table)


if __name__ == "__main__":
    sys.exit(main())
