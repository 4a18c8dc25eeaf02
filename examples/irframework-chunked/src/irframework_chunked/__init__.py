"""The plugin `chunked` of irframework: its hooks."""

from collections.abc import Iterable, Mapping

import irframework as ir

IRFRAMEWORK_API = 1


@ir.hookimpl
def irframework_register_ops() -> None:
    from irframework_chunked import soft_cap  # noqa: F401 - importing it declares the op


@ir.hookimpl
def irframework_register_impls() -> None:
    from irframework_chunked import kernels

    kernels.register("chunked")


@ir.hookimpl
def irframework_default_priorities(platform: ir.Platform, mode: str) -> Mapping[str, Iterable[str]] | None:
    if platform.name == "cpu" and mode == "eager":
        return {"rms_norm": ["chunked"], "soft_cap": ["chunked"]}
    return None
