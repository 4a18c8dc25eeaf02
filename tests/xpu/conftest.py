"""Owns which of these tests run in which process: those that call vllm-xpu-kernels need a stand-in on the path.

`test_xpu_process.py` runs them. By hand: `PYTHONPATH=tests/xpu/stand_in pytest tests/xpu`.
"""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
_spec = importlib.util.find_spec("vllm_xpu_kernels")
WITH_STAND_IN = _spec is not None and str(_spec.origin).startswith(str(HERE))

if importlib.util.find_spec("irframework_xpu_sycl") is None:
    collect_ignore_glob = ["test_*.py"]
elif WITH_STAND_IN:
    collect_ignore_glob = ["test_xpu_process.py", "test_xpu_registration.py", "test_sycl_*.py"]
else:
    collect_ignore_glob = ["test_xpu_contract.py"]
