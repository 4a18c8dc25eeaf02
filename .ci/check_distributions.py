"""Checks what `make wheels` built: names, tags and contents of each sdist and wheel.

Owns what a distribution of this repository must look like. Does not build.
"""

import sys
import tarfile
import zipfile
from pathlib import Path


def main(directory: Path) -> int:
    """Print one line per distribution; 1 if something is wrong."""
    problems: list[str] = []
    wheels, sdists = sorted(directory.glob("*.whl")), sorted(directory.glob("*.tar.gz"))
    for path in wheels:
        problems += _problems_of_wheel(path)
    for path in sdists:
        problems += _problems_of_sdist(path)
    built = {path.name.split("-")[0] for path in wheels}
    if built != {path.name.split("-")[0] for path in sdists} or "irframework" not in built:
        problems.append(f"{directory}: every project needs a wheel and an sdist, found {wheels} and {sdists}")
    for path in wheels + sdists:
        print(f"{path.name}  {path.stat().st_size // 1024} KiB")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _problems_of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        libraries = {name: archive.read(name) for name in names if name.endswith((".so", ".pyd", ".dylib"))}
    problems = []
    pure = path.name.endswith("-py3-none-any.whl")
    if libraries and pure:
        problems.append(f"{path.name} is tagged pure and holds {sorted(libraries)}")
    if not libraries and not pure:
        problems.append(f"{path.name} is tagged for a platform and holds no library")
    if "-py3-none-" not in path.name:
        problems.append(f"{path.name} must serve every Python 3 (py3-none-...)")
    if path.name.startswith("irframework-") and not pure:
        problems.append(f"{path.name}: the core holds no kernels")
    if path.name.startswith("irframework_vllm_c-") and not libraries:
        problems.append(f"{path.name} holds no kernels")
    if path.name.startswith("irframework_xpu_sycl-") and not any(name.endswith("/csrc/kernels.cpp") for name in names):
        problems.append(f"{path.name} lacks the SYCL kernels, which are compiled where they run")
    here = str(Path.cwd()).encode()
    problems += [
        f"{path.name}: {name} holds a path of this machine" for name, data in libraries.items() if here in data
    ]
    if not any(name.endswith("licenses/LICENSE") for name in names):
        problems.append(f"{path.name} holds no licence")
    if not any(name.endswith("/py.typed") for name in names):
        problems.append(f"{path.name} holds no py.typed")
    return problems


def _problems_of_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    problems = [f"{path.name}: {m.name} is a link out of the sdist" for m in members if m.issym() or m.islnk()]
    if not any(name.count("/") == 1 and name.endswith("/LICENSE") for name in names):
        problems.append(f"{path.name} holds no licence")
    sources = {"irframework_vllm_c": ("common", "cpu", "cuda"), "irframework_xpu_sycl": ("",)}
    for part in sources.get(path.name.split("-")[0], ()):
        if not any(f"/csrc/{part}" in name for name in names):
            problems.append(f"{path.name} lacks csrc/{part}, so that it cannot build by itself")
    if any(part in name.split("/") for name in names for part in (".venv", "__pycache__", "_build", "build")):
        problems.append(f"{path.name} holds build output")
    return problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
