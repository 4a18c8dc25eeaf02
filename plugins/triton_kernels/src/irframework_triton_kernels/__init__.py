"""The plugin `triton_kernels` of irframework: the standard ops in Triton, as provider `triton`.

Owns the plugin's hooks. Which calls the kernels take is in `implementations`, how they are launched in `launch`, the
kernels are in `kernels`. Triton is not imported before a kernel is needed.
"""

from collections.abc import Iterable, Mapping

import irframework as ir

__all__ = ["IRFRAMEWORK_API"]

IRFRAMEWORK_API = 1
PROVIDER = "triton"
PLATFORMS = ("cuda", "rocm")


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `triton` for the standard ops."""
    from irframework_triton_kernels import implementations

    implementations.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Prefers the kernels on CUDA and ROCm, in both modes. On Intel GPUs they run when they are asked for."""
    return {"*": (PROVIDER,)} if platform.name in PLATFORMS else None
