"""From a file on disk to processes, and back to a report."""

import os

# torch reads it once, when it is imported.  Its C++ warns, with a trace of frames, whenever another
# host goes; what that means is said in our own errors.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
