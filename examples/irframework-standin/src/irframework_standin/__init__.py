"""The plugin `standin` of irframework: its hooks."""

from collections.abc import Iterable

import irframework as ir

IRFRAMEWORK_API = 1


@ir.hookimpl
def irframework_platforms() -> Iterable[ir.Platform]:
    from irframework_standin.platform import StandinPlatform

    return [StandinPlatform()]


@ir.hookimpl
def irframework_register_impls() -> None:
    from irframework_standin import kernels

    kernels.register("standin")


@ir.hookimpl
def irframework_passes(stage: str):
    from irframework_standin.passes import CountOps

    return [CountOps()] if stage == "after_fusion" else None


@ir.hookimpl
def irframework_compiler(platform: ir.Platform):
    from irframework_standin.compiler import compile_graph

    return compile_graph if platform.name == "standin" else None
