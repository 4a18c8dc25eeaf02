"""Loads the kernels for this directory's tests; skips them where the plugin is not installed."""

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("irframework_vllm_c") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from irframework_vllm_c import library

    @pytest.fixture(scope="session", autouse=True)
    def kernels() -> None:
        library.load_cpu_kernels()

    @pytest.fixture(params=["avx512", "avx2", "plain"])
    def isa(request: pytest.FixtureRequest) -> Iterator[str]:
        """Each instruction set in turn; those that this machine lacks are skipped."""
        try:
            library.use_instruction_set(request.param)
        except ValueError as missing:
            pytest.skip(str(missing))
        yield request.param
        library.use_instruction_set(None)
