"""Owns finding the SYCL run-time library with its headers, and building the host library against them.

Nothing of SYCL is needed to install this plugin. The host library, `csrc/host.cpp`, is C++ against the headers that lie
beside the run-time library, so it is compiled where it runs, once, and kept: a library built elsewhere would fit one
major version of the run-time library only, and torch for Intel GPUs brings its own. Does not load anything.

Knows nothing of irframework.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "intel-sycl-rt"
OPENCL_DISTRIBUTION = "intel-opencl-rt"
CACHE_VARIABLE = "IRFRAMEWORK_XPU_SYCL_CACHE"
SOURCES = Path(__file__).parent / "csrc"
LINES_OF_A_LOG = 8


class SyclError(ImportError):
    """The SYCL kernels cannot be used here; the message says what is missing, or what failed."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """An installed SYCL run-time library.

    Attributes:
        version: Version of the distribution.
        library: `libsycl.so` with its major number.
        include: The directory of its headers.
    """

    version: str
    library: Path
    include: Path

    @property
    def compile_options(self) -> tuple[str, ...]:
        """What this version's compiler needs to be told beside the kernels' own options."""
        # Version 8 links device libraries that its distribution lacks and the kernels do not use; 9 has no such flag.
        return ("-fno-sycl-device-lib=all",) if self.library.name.endswith(".so.8") else ()


def find_runtime() -> Runtime:
    """Find the installed run-time library.

    Raises:
        SyclError: It is not installed, or its distribution lacks the library or the headers.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise SyclError(
            f"the SYCL run-time library is missing ({DISTRIBUTION} is not installed); torch for Intel GPUs brings it"
        ) from None
    library = _file_of(distribution, r"libsycl\.so\.\d+")
    header = _file_of(distribution, r"include/sycl/sycl\.hpp")
    if library is None or header is None:
        lacking = "libsycl.so" if library is None else "the headers (include/sycl/sycl.hpp)"
        raise SyclError(f"{DISTRIBUTION} {distribution.version} does not hold {lacking}; reinstall it")
    return Runtime(distribution.version, library.parent.resolve() / library.name, header.parents[1].resolve())


def opencl_driver() -> Path | None:
    """Where the OpenCL driver for CPUs was installed, or None."""
    try:
        return _file_of(importlib.metadata.distribution(OPENCL_DISTRIBUTION), r"libintelocl\.so")
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_of(distribution: importlib.metadata.Distribution, pattern: str) -> Path | None:
    whole = re.compile(rf"(.*/)?{pattern}")
    for file in distribution.files or ():
        if whole.fullmatch(file.as_posix()):
            path = Path(str(distribution.locate_file(file)))
            if path.exists():
                return path
    return None


def loaded_libraries(maps: str) -> set[Path]:
    """Return the SYCL run-time libraries that a process has loaded, read from the text of its memory map."""
    return {Path(path).resolve() for path in re.findall(r"(/\S*/libsycl\.so\.\d\S*)", maps)}


def check_loaded(runtime: Runtime) -> None:
    """See to it that no other run-time library is in this process: objects of one are nothing to another.

    Raises:
        SyclError: There is one.
    """
    maps = Path("/proc/self/maps")
    others = loaded_libraries(maps.read_text()) - {runtime.library.resolve()} if maps.exists() else set()
    if others:
        raise SyclError(
            f"this process runs on {sorted(map(str, others))[0]}, but {DISTRIBUTION} {runtime.version} is "
            f"{runtime.library}; install the version that torch was built for"
        )


def host_library(runtime: Runtime) -> Path:
    """Return the compiled host library; it is built when there is none for this runtime, compiler and source.

    Raises:
        SyclError: There is no C++ compiler, it fails, or the library cannot be stored.
    """
    compiler = _compiler()
    sources = [SOURCES / "host.cpp", SOURCES / "arguments.h"]
    parts = [str(runtime.library), runtime.version, compiler, *(source.read_text() for source in sources)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    place = _cache_directory() / f"_C_sycl-{key}.so"
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as directory:
            built = Path(directory) / place.name
            _build(runtime, compiler, sources[0], built)
            os.replace(built, place)  # others may build the same at the same time
    except OSError as error:
        raise SyclError(
            f"the host library of the SYCL kernels cannot be stored in {place.parent} ({error}); name another "
            f"directory by {CACHE_VARIABLE}"
        ) from error
    return place


def _cache_directory() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "irframework" / "xpu_sycl"


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise SyclError(
        f"no C++ compiler is found ({f'CXX={wanted}' if wanted else 'g++, clang++ or c++'}); the host library of the "
        "SYCL kernels is compiled where it runs"
    )


def _build(runtime: Runtime, compiler: str, source: Path, built: Path) -> None:
    directory = runtime.library.parent
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-w", f"-I{runtime.include}", str(source)]
    command += [f"-L{directory}", f"-l:{runtime.library.name}", f"-Wl,-rpath,{directory}", "-o", str(built)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise SyclError(f"{compiler} did not compile the host library of the SYCL kernels in 300 s") from error
    if done.returncode:
        raise SyclError(
            f"{compiler} does not compile the host library of the SYCL kernels against {DISTRIBUTION} "
            f"{runtime.version}:\n{first_lines(done.stderr)}"
        )


def first_lines(log: str) -> str:
    """Shorten a compiler's log to where it says what is wrong."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if "error" in line.lower()]
    start = errors[0] if errors else 0
    return "\n".join(lines[start : start + LINES_OF_A_LOG])
