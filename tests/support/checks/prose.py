"""Find docstrings that are hard to read.

    python tests/support/checks/prose.py [FOLDER ...]

It prints, for each file, docstrings whose first sentence has no subject, functions named by a
participle, and words of a private dialect in docstrings, comments and messages.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# A first word that begins a phrase rather than a sentence: "Of a step.", "What of it is sent."
NO_SUBJECT = re.compile(
    r"(Of|What|Whatever|Whoever|Whether|How|Where|Which|Those|Them|That|As|In|On|By|With|From|At|To|For"
    r"|Than|Not|Behind|Beside|Before|After|Until|Without|When|While|Whose|So|Also|Else|More|Same)\b"
)
DIALECT = re.compile(
    r"\b(told|tells?|so many|beside|apart|crowd|heard|no way to|wants? of|in short|hears?|as is"
    r"|meanwhile|of its own accord|whoever|likes of)\b",
    re.IGNORECASE,
)
# Phrases of which there are still some, with what to write instead.
PHRASES = {
    "goes on": "continues",
    "anew": "again",
    "those that there are": "the present ones",
    "comes again": "comes back",
    "is no": "is not a",
}
# Names that say nothing of what they hold, of which there are still some.
EMPTY_NAMES = ("told", "found", "made", "behind", "anew")
# A name of one word that is a participle: "planned".
PARTICIPLE = re.compile(r"_?([a-z]+(?:ed|ade|uilt|ept|eft|ound|aid|ent|orn|awn|old))$")
NO_PARTICIPLES = {"accept", "argument", "around", "assignment", "augment", "bound", "embed"}
NO_PARTICIPLES |= {
    "experiment",
    "extent",
    "feed",
    "fold",
    "gradient",
    "indent",
    "intent",
    "moment",
    "need",
    "represent",
    "round",
    "seed",
}
NO_PARTICIPLES |= {"speed", "stacked", "unfold"}  # stacked: a method of users' data sets


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of a module, but not those inside of functions."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from (
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            )


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, name, docstring) of the module, its classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), getattr(node, "name", "module"), text


def has_no_subject(docstring: str) -> bool:
    """Whether the first sentence begins as a phrase does, or has fewer than two words."""
    first = docstring.split("\n\n")[0].strip()
    return bool(NO_SUBJECT.match(first)) or len(first.split()) < 2


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and of strings with a space: docstrings, messages."""
    for number, line in enumerate(source.splitlines(), 1):
        if (start := line.find("# ")) >= 0:
            yield number, line[start:]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, parameters and variables, each time that they are bound."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def plain_words(file: Path) -> Counter[str]:
    """How often a file's texts have a phrase of PHRASES, or a name that it binds is one of
    EMPTY_NAMES, or has it as a part.
    """
    source = file.read_text()
    tree = ast.parse(source)
    parts = Counter(part for name in bound_names(tree) for part in name.lower().split("_"))
    said = " ".join(" ".join(text.split()) for _, text in texts(source, tree))
    phrases = {phrase: len(re.findall(rf"\b{phrase}\b", said)) for phrase in PHRASES}
    return Counter({f"{name}_": parts[name] for name in EMPTY_NAMES} | phrases)


def findings(file: Path) -> Iterator[tuple[str, int, str]]:
    """(kind, line, what) of all that is hard to read in a file."""
    source = file.read_text()
    tree = ast.parse(source)
    for line, name, text in docstrings(tree):
        if has_no_subject(text):
            yield "subject", line, f"{name}: {text.splitlines()[0]}"
    for node in functions(tree):
        is_property = any(
            getattr(d, "id", getattr(d, "attr", "")) in ("property", "cached_property")
            for d in node.decorator_list
        )
        found = PARTICIPLE.match(node.name)
        if found and found[1] not in NO_PARTICIPLES and not is_property:
            yield "verb", node.lineno, node.name
    for line, text in texts(source, tree):
        for match in DIALECT.finditer(text):
            yield "dialect", line + text[: match.start()].count("\n"), match.group()


def main(folders: list[str]) -> None:
    """Print every finding, and how many there are of each kind."""
    counts: Counter[str] = Counter()
    for folder in folders or ["engine", "launcher", "models", "testing"]:
        path = ROOT / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            counts += plain_words(file)
            for kind, line, what in findings(file):
                counts[kind] += 1
                print(f"{file.relative_to(ROOT)}:{line}: {kind}: {what}")
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
