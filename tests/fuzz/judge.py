"""Judge: status and text of a command that planned a mutated recipe -> an outcome.

A mistake should be one error with a place, in words of its own.  Everything else is a fault.
"""

import re

COMPOSED, PLANNED, LOCATED = "composed", "planned", "located error"
UNLOCATED, EXCEPTION = "error without a place", "Python exception as the text"
TRACEBACK, BUG = "traceback", "named as a bug of flowrun"
HANG, MEMORY, CRASH, LONG = "hang", "memory", "crash", "text too long"
WELL = (COMPOSED, PLANNED, LOCATED)
FAULTS = (UNLOCATED, EXCEPTION, TRACEBACK, BUG, HANG, MEMORY, CRASH, LONG)

MOST_CHARACTERS = 4000  # of an error
_PLACE = re.compile(r"command line\b|\S+\.ya?ml\b|\S*/\S+")  # a path is one, too
_OF_PLAN = re.compile(r"(op|actor|register|stage|module|parameter)\b")  # what the compiler refuses
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception|StopIteration)\b")
# what a library in Rust writes itself before its panic becomes an error
_PANIC = re.compile(
    r"\s*thread '[^']*' \(\d+\) panicked at .*?(?=^command line\b)", re.DOTALL | re.M
)
_NO_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory")


def judge(status: int, text: str, peak_bytes: int, most_bytes: int) -> str:
    """Name the outcome.

    status: exit status, negative for a signal.  text: stderr.  peak_bytes: resident memory.
    most_bytes: what is allowed.
    """
    text = _PANIC.sub("", text)
    if status in (-24, -14):  # SIGXCPU, SIGALRM
        return HANG
    if peak_bytes > most_bytes or _NO_MEMORY.search(text):
        return MEMORY
    if status < 0:
        return CRASH
    if "Traceback (most recent call last)" in text:
        return TRACEBACK
    if text.startswith("a bug in flowrun"):
        return BUG
    if status == 0:
        return PLANNED
    return _of_error(text)


def _of_error(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        return LONG
    if _PLACE.match(text) or _OF_PLAN.match(text):
        return LOCATED
    return EXCEPTION if _EXCEPTION.search(text) else UNLOCATED
