"""From a file on disk to processes, and back to a report."""

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
