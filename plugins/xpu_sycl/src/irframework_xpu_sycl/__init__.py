"""The plugin `xpu_sycl` of irframework: kernels for Intel GPUs, as provider `xpu_kernels`.

Owns the plugin's hooks. Loading the kernels is in `library`, which calls they take in `implementations`, their torch
ops in `operators`.
"""

from collections.abc import Iterable, Mapping

import irframework as ir

__all__ = ["IRFRAMEWORK_API"]

IRFRAMEWORK_API = 1
PROVIDER = "xpu_kernels"


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `xpu_kernels` for the standard ops."""
    from irframework_xpu_sycl import implementations

    implementations.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Prefers the kernels on Intel GPUs, in both modes."""
    return {"*": (PROVIDER,)} if platform.name == "xpu" else None
