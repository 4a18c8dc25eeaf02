"""Passes over collectives: sequence parallelism, and kernels of torch for collectives in symmetric memory.

`sequence_parallel.py` is the pass, `sharding.py` knows what works on rows, `symmetric_memory.py` is the provider. What
collectives mean is in `irframework/ops/collectives.py` and `fused_collectives.py`.
"""

from typing import Any

__all__ = ["enable_symmetric_memory"]


def __getattr__(name: str) -> Any:
    if name == "enable_symmetric_memory":
        from irframework.distributed.symmetric_memory import enable_symmetric_memory

        return enable_symmetric_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
