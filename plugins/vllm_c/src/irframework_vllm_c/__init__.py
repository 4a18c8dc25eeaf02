"""The plugin `vllm_c` of irframework: C++ and CUDA kernels for the standard ops.

Owns the plugin's hooks. The kernels are loaded by `library`, registered by `implementations`.
"""

from collections.abc import Iterable, Mapping

import irframework as ir
from irframework_vllm_c.library import KernelsNotLoadedError, instruction_set

__all__ = ["IRFRAMEWORK_API", "KernelsNotLoadedError", "instruction_set"]

IRFRAMEWORK_API = 1
PROVIDER = "vllm_c"


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `vllm_c` for the standard ops."""
    from irframework_vllm_c import attention, cpu_only, fused, implementations

    implementations.register(PROVIDER)
    cpu_only.register(PROVIDER)
    attention.register(PROVIDER)
    fused.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Puts the kernels first on CPUs and CUDA devices; other platforms have none of ours.

    Where Inductor's own loops cost less than calls on CPUs, the implementations withdraw themselves: see `graphs`.
    """
    return {"*": (PROVIDER,)} if platform.name in ("cpu", "cuda") else None
