"""The bundled ``penstock`` program: the storage node and its administration."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def program() -> Path:
    """Return the path of the program that came with the wheel.

    Raises FileNotFoundError where the package was not installed from a wheel.
    """
    path = Path(__file__).parent / "_bundled" / "penstock"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: this package was not installed from a wheel; make wheel builds one")
    return path


def main() -> None:
    """Become the program, so that signals and the exit code are its own."""
    path = program()
    os.execv(path, ["penstock", *sys.argv[1:]])
