"""Owns which of these tests run in which process: Triton either interprets kernels or compiles them, never both.

`test_interpreter_process.py` runs the interpreted ones in a process of their own. By hand:
`TRITON_INTERPRET=1 pytest tests/triton -m interpreter`.
"""

import importlib.util
import os
from pathlib import Path

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# Of numpy, which the interpreter computes with: a device overflows to inf without a word.
NUMPY = (
    "ignore:overflow encountered",
    "ignore:invalid value encountered",
    "ignore:divide by zero encountered",
    "ignore:Conversion of an array with ndim",
    "ignore:All-NaN slice encountered",
)
HERE = Path(__file__).parent

if importlib.util.find_spec("irframework_triton_kernels") is None:
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETING:
    collect_ignore_glob = [path.name for path in HERE.glob("test_*.py") if "interpreted" not in path.name]
else:
    collect_ignore_glob = ["test_interpreted_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("interpreter") is not None:
            for warning in NUMPY:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def matrices_of_bfloat16(monkeypatch):
    """The interpreter (Triton 3.6) multiplies the bits of bfloat16 matrices as integers: give it their values."""
    import triton.language as tl
    from triton.runtime import interpreter

    whole = interpreter.InterpreterBuilder.create_dot

    def values(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        as_float = (x.data.astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(as_float, tl.float32)

    def create_dot(self, a, b, *more):
        return whole(self, values(a), values(b), *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
