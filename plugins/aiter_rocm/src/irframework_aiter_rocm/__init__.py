"""The plugin `aiter_rocm` of irframework: AITER's kernels for AMD GPUs, as provider `aiter`.

Owns the plugin's hooks. Finding AITER and checking its functions is in `library`, which calls they take in
`implementations`, their torch ops in `operators`. AITER is not imported before a kernel is needed.
"""

from collections.abc import Iterable, Mapping

import irframework as ir

__all__ = ["IRFRAMEWORK_API"]

IRFRAMEWORK_API = 1
PROVIDER = "aiter"
QUANTISING = (
    "static_quant_fp8",
    "rms_norm_static_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8",
    "silu_and_mul_static_quant_fp8",
)


@ir.hookimpl
def irframework_register_impls() -> None:
    """Registers provider `aiter` for the ops that AITER has functions for."""
    from irframework_aiter_rocm import implementations

    implementations.register(PROVIDER)


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    """Prefers AITER on ROCm; for codes only in eager mode, since Inductor fuses native's quantisation into one pass."""
    if platform.name != "rocm":
        return None
    if mode == "eager":
        return {"*": (PROVIDER,)}
    return {"*": (PROVIDER,), **dict.fromkeys(QUANTISING, ("native", PROVIDER))}
