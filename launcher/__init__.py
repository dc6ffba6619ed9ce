"""Turn a recipe on disk into processes, and what they measure into a report.

run.py is the story on a page: read it first.  Arguments enter in cli.py.  A folder imports only
folders above it in this list (tests/test_tree.py):

terminal/         the console, units of quantities, the line that says what is being done
platforms/        who started this process: Slurm, torchrun, MPI …
urls/             what lies at a URL, by fsspec
recipe/           YAML and command line -> a Recipe, checked
data/             data sets, text as ids; which samples a step reads, and who makes them
model/ store/     model, data and loss as objects; checkpoints and weights on disk
text/             text from a model, token by token
job/              a recipe made concrete: strategy, materials, plans
listeners/        loggers and callbacks
report/           the plan for a person, the files of a run's folder, the report
ranks/            what runs inside a rank
supervise/ place/ the life of a run; auto.placement: the fastest placement that fits
commands/         what the other commands do: verify, resume, export, sample, eval, calibrate
page/             a plan, runs or a sweep as one HTML file
bench/            flowrun compared with torch's own layouts, and with published tables
command_line/     the commands' arguments, for cli.py; a job or a sweep; Slurm, Ray

multirun.py keeps a name that users' own files refer to.
"""

import os
import sys
from types import TracebackType

# torch reads it once, when it is imported.  Its C++ warns, with a trace of frames, whenever another
# host goes; what that means is said in our own errors.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ctrl-C while the command line is still being imported is no error."""
    if kind is KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if os.path.basename(sys.argv[0] if sys.argv else "") == "flowrun":  # the command, no library
    sys.excepthook = _show_error
