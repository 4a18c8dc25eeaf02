"""Owns which of these tests run in which process: those that call AITER need a stand-in for it on the path.

`test_aiter_process.py` runs them. By hand: `PYTHONPATH=tests/aiter/stand_in pytest tests/aiter`.
"""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
_spec = importlib.util.find_spec("aiter")
WITH_STAND_IN = _spec is not None and str(_spec.origin).startswith(str(HERE))

if importlib.util.find_spec("irframework_aiter_rocm") is None:
    collect_ignore_glob = ["test_*.py"]
elif WITH_STAND_IN:
    collect_ignore_glob = ["test_aiter_process.py", "test_aiter_registration.py"]
else:
    collect_ignore_glob = ["test_aiter_contract.py"]
