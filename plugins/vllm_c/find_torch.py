"""Prints the directory of the installed torch for CMake, without importing it."""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

VARIABLE = "IRFRAMEWORK_TORCH_DIR"


def candidates() -> list[Path]:
    """Places to look, the first hit wins: the variable, this Python's path, and what build isolation hides from it."""
    places = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        places += [Path(place) for place in spec.submodule_search_locations]
    places.append(Path(sysconfig.get_path("platlib")) / "torch")
    return places


def main() -> int:
    """Exit status 0 and the directory on standard output, or 1 and what to do on standard error."""
    for place in candidates():
        if (place / "include/torch/csrc/stable/library.h").is_file():
            print(place.resolve())
            return 0
    looked = ", ".join(str(place) for place in candidates())
    print(
        f"torch >= 2.11 was not found (looked in: {looked}). Install it first, or set {VARIABLE} to the directory "
        "of an installed torch (the one that holds include/ and lib/).",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
