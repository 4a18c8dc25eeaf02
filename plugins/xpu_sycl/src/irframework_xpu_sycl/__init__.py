"""The plugin `xpu_sycl` of irframework: kernels for Intel GPUs, as provider `xpu_kernels`.

Owns the plugin's hooks. `route` says which of two sets of kernels stands behind the provider: those of
vllm-xpu-kernels (`library` loads them, `operators` are their torch ops, `implementations` says which calls they take),
or our own in SYCL (`sycl_runtime`, `sycl_kernels`, `sycl_operators`, `sycl_implementations`).
"""

from collections.abc import Iterable, Mapping

import irframework as ir

__all__ = ["IRFRAMEWORK_API"]

IRFRAMEWORK_API = 1
PROVIDER = "xpu_kernels"


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `xpu_kernels` for the standard ops."""
    from irframework_xpu_sycl import route

    if route.package_is_here() and not route.runs_on_cpu():
        from irframework_xpu_sycl import implementations

        implementations.register(PROVIDER)
    else:
        from irframework_xpu_sycl import sycl_implementations

        sycl_implementations.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Prefers the kernels on Intel GPUs, in both modes."""
    return {"*": (PROVIDER,)} if platform.name == "xpu" else None
