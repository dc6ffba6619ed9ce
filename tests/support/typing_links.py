"""A folder of links, build/typing/flowrun/*, in which type checkers find flowrun.engine and so on.

Type checkers refuse import hooks, so an editable install's package-dir map is invisible to them.
Run before mypy:
    python tests/support/typing_links.py && MYPYPATH=build/typing mypy -p flowrun
"""

from pathlib import Path

PACKAGES = ("conf", "engine", "launcher", "models", "recipes", "testing")


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    folder = root / "build" / "typing" / "flowrun"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*PACKAGES, "__init__.py"):
        link = folder / name
        if link.is_symlink():
            link.unlink()
        link.symlink_to(root / name, target_is_directory=(root / name).is_dir())


if __name__ == "__main__":
    main()
