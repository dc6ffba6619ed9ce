"""Run a command as if this machine had GPUs, to try what only runs on CUDA.

python tests/support/hollow_gpu/run.py python -m pytest tests/engine/runtime/test_cuda.py
python tests/support/hollow_gpu/run.py --gpus 4 flowrun verify recipe=gpt_hybrid launch.device=cuda

It takes torch's CUDA build, CUDA's headers (a toolkit's, or the wheels cuda-toolkit[crt,cccl]) and
g++; `.ci/gpu` installs them and runs both commands.  Torch's own code for CUDA runs: its allocator,
streams, NCCL's process groups, Inductor with Triton.  What it calls is replaced: streams are
threads, kernels do nothing, and the CPU computes an op when its stream comes to it (ops.py).  So it
shows whether results are those of the CPU, whether a step waits, and whether ranks wait for each
other; it shows nothing of time.  Limits that devices have (--lazy, --room, --mib) are off unless
they are given.  Kernels that Inductor makes for the GPU run, but nothing computes them: their
losses are NaN, and tests that compare them fail.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMITS = {
    "lazy": "1: code is loaded at its first launch, when the device is idle",
    "room": "launches of NCCL that are under way at once, in the order of the host",
    "mib": "memory of a device",
    "communicator-mib": "what a communicator takes of it",
}


def build(folder: Path) -> None:
    """libhollow.so, which comes before torch's libraries, and what is found by name."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkit = Path(os.environ.get("CUDA_HOME", wheels / "cu13"))
    if not (toolkit / "include" / "crt" / "host_config.h").exists():
        sys.exit(f"no headers of CUDA are at {toolkit}: CUDA_HOME says where")
    nccl = wheels / "nccl"
    headers = [f"-I{place}/include" for place in (toolkit, nccl)]
    parts = {
        "libhollow.so": ["cuda.cpp", "nccl.cpp", "libraries.cpp", "-DBLAS"],
        "libcuda.so.1": ["libraries.cpp", "-DDRIVER", "-Wl,-soname,libcuda.so.1"],
        "libnvidia-ml.so.1": ["libraries.cpp", "-DNVML"],
    }
    for name, parameters in parts.items():
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility-inlines-hidden"]
        subprocess.run(
            [*command, *headers, *parameters, "-o", folder / name, "-ldl", "-lpthread"],
            cwd=HERE,
            check=True,
        )
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # Triton links it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--delay-us", type=int, default=0, help="streams dawdle, at random")
    for name, what in LIMITS.items():
        parser.add_argument(f"--{name}", type=int, default=0, help=what)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    limits = {name: getattr(given, name) for name in (k.replace("-", "_") for k in LIMITS)}
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        before = os.environ.get("PYTHONPATH")
        return subprocess.run(
            given.command,
            env={
                **os.environ,
                "LD_PRELOAD": f"{folder}/libhollow.so",
                "LD_LIBRARY_PATH": folder,
                "TRITON_LIBCUDA_PATH": folder,
                "PYTHONPATH": f"{HERE}:{before}" if before else str(HERE),
                "PYTEST_PLUGINS": "plugin",
                "HOLLOW_GPUS": str(given.gpus),
                "HOLLOW_DELAY_US": str(given.delay_us),
                **{f"HOLLOW_{name.upper()}": str(n) for name, n in limits.items() if n},
            },
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
