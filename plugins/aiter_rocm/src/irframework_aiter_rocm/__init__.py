"""The plugin `aiter_rocm` of irframework: AITER's kernels for AMD GPUs, as provider `aiter`.

Owns the plugin's hooks. Finding AITER and checking its functions is in `library`, which calls they take in
`implementations`, their torch ops in `operators`. AITER is not imported before a kernel is needed.
"""

from collections.abc import Iterable, Mapping

import irframework as ir

__all__ = ["IRFRAMEWORK_API"]

IRFRAMEWORK_API = 1
PROVIDER = "aiter"


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `aiter` for the ops that AITER has functions for."""
    from irframework_aiter_rocm import implementations

    implementations.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Prefers AITER on ROCm, in both modes."""
    return {"*": (PROVIDER,)} if platform.name == "rocm" else None
