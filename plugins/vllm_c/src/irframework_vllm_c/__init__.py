"""The plugin `vllm_c` of irframework: C++ and CUDA kernels for the standard ops.

Owns the plugin's hooks. The kernels are loaded by `library`, registered by `implementations`.
"""

from collections.abc import Iterable, Mapping

import irframework as ir
from irframework_vllm_c.library import KernelsNotLoadedError, instruction_set

__all__ = ["IRFRAMEWORK_API", "KernelsNotLoadedError", "instruction_set"]

IRFRAMEWORK_API = 1
PROVIDER = "vllm_c"
# On CPUs Inductor makes one loop of each, where it stands. A kernel is faster for many tokens, but for one its call
# costs compiled code more than its work does: what a model has written out is not to become slower by being found.
LEFT_TO_INDUCTOR = ("silu_mul", "gelu_mul", "apply_rotary_pos_emb")


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

    `LEFT_TO_INDUCTOR` is native in compiled code on CPUs, unless somebody asks for the kernels.
    """
    if platform.name not in ("cpu", "cuda"):
        return None
    left = LEFT_TO_INDUCTOR if (platform.name, mode) == ("cpu", "inductor") else ()
    return {"*": (PROVIDER,), **dict.fromkeys(left, ("native",))}
