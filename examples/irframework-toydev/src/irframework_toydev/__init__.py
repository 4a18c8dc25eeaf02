"""The plugin `toydev` of irframework: its hooks. `import torch` has added the device before, see pyproject.toml."""

from collections.abc import Iterable

import irframework as ir

IRFRAMEWORK_API = 1


@ir.hookimpl
def irframework_platforms() -> Iterable[ir.Platform]:
    from irframework_toydev.platform import ToyPlatform

    return [ToyPlatform()]


@ir.hookimpl
def irframework_register_impls() -> None:
    from irframework_toydev import provider

    provider.register("toy_kernels")


@ir.hookimpl
def irframework_passes(stage: str):
    from irframework_toydev.passes import DropUnitFactors

    return [DropUnitFactors()] if stage == "after_fusion" else None


@ir.hookimpl
def irframework_compiler(platform: ir.Platform):
    from irframework_toydev.compiler import compile_graph

    return compile_graph if platform.name == "toy" else None
