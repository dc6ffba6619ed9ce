"""torchvision and timm: whether they are there, and of which versions."""

from importlib.metadata import version
from importlib.util import find_spec

from flowrun.launcher.data.transforms import import_torchvision


def versions() -> str:
    """Of torch and of what the architectures come from."""
    names = ("torch", "transformers", "torchvision", "timm")
    there = [f"{name} {version(name).split('+')[0]}" for name in names if find_spec(name)]
    return ", ".join(there)


def is_installed() -> bool:
    return all(find_spec(name) is not None for name in ("torchvision", "timm"))


def make_importable() -> None:
    """Import torchvision where it is there; timm and transformers can then import it too."""
    if is_installed():
        import_torchvision()
