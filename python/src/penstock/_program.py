"""The bundled ``penstock`` program: the storage node and its administration."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def program() -> Path:
    """Return the path of the program in the wheel.

    Raises FileNotFoundError if the package was not installed from a wheel.
    """
    path = Path(__file__).parent / "_bundled" / "penstock"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: this package was not installed from a wheel; make wheel builds the wheel")
    return path


def main() -> None:
    """Replace this process by the program, which then receives signals and determines the exit code."""
    path = program()
    os.execv(path, ["penstock", *sys.argv[1:]])
