"""The packages of flowrun: every folder of code or of recipes' words in the tree.

flowrun.X is ./X.  hatchling's `sources` say the same in a line, but its editable installs cannot
add a prefix (pfmoore/editables, issue 20).
"""

from setuptools import find_namespace_packages, setup

TOPS = ("conf", "engine", "launcher", "models", "recipes", "testing")
FOLDERS = find_namespace_packages(include=[*TOPS, *(f"{top}.*" for top in TOPS)])

setup(
    script_name="setup.py",  # which is no module of the package, though it lies beside it
    packages=["flowrun", *(f"flowrun.{folder}" for folder in FOLDERS)],
)
