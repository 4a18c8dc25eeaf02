"""`torch.compile(model, backend="irframework")`, and lowering for other backends.

Owns the two entries into the compiler. Does not own the passes (`pipeline.py`) or where Inductor calls them
(`hooks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from irframework.compiler import guards, hooks
from irframework.compiler.attempts import Attempt
from irframework.compiler.foreign_passes import Given, read_passes
from irframework.compiler.pipeline import PostPass, PrePass, remember_place, run_pre_grad
from irframework.compiler.report import Report, current_report, one_report
from irframework.errors import IrError
from irframework.platform import current_platform
from irframework.plugins import platform_compiler
from irframework.priority import option_scope, parse_priorities

_PRIORITY_OPTION, _PASSES_OPTION = "ir_op_priority", "ir_passes"


def irframework(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: IR ops are lowered, then Inductor compiles.

    Args:
        module: What Dynamo captured.
        example_inputs: Its inputs.
        options: `ir_op_priority`, a mapping from ops to provider lists that stands above the configuration and below
            `with ir.priority`; `ir_passes`, a mapping from stages to lists of passes, which run beside those of plugins
            and of `ir.compiler.register_pass`; all others go to Inductor.
        mode: As for `torch.compile`.

    Returns:
        The compiled function.
    """
    rest = dict(options or {})
    option_priority = _priority_option(rest.pop(_PRIORITY_OPTION, None))
    passes = read_passes(rest.pop(_PASSES_OPTION, None))
    with option_scope(option_priority):  # a mistake in it is found before anything is compiled
        compiler = platform_compiler(current_platform())
    guards.watch_choices()
    run_pre_grad(module.graph, donate_inputs=True)
    module.recompile()
    if compiler is None:
        from torch._inductor.compile_fx import compile_fx

        current_report()
        remember_place(module.graph, option_priority, passes)
        patches = hooks.configuration({**hooks.mode_options(mode), **rest}, option_priority, passes)
        return cast("Callable[..., Any]", compile_fx(module, example_inputs, config_patches=patches))
    return _compile_for_platform(module, example_inputs, compiler, option_priority, passes)


def _priority_option(value: Any) -> Mapping[str, Any] | None:
    """Read the compile option: all that `KernelConfig(ir_op_priority=...)` takes.

    Raises:
        PrioritySyntaxError: It cannot be read.
    """
    if value is None:
        return None
    lists = value.as_dict() if hasattr(value, "as_dict") else value
    return parse_priorities(lists, 'options={"ir_op_priority": ...}')


def _compile_for_platform(
    module: GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    option_priority: Mapping[str, Any] | None,
    passes: Given,
) -> Callable[..., Any]:
    """Hand lowered graphs to the compiler that a plugin gives for its platform."""
    from torch._dynamo.backends.common import aot_autograd

    def compile_one(inference: bool) -> Callable[..., Any]:
        def run(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compiler(_lower(graph, inputs, inference, option_priority, passes), inputs)

        return run

    backend: Callable[..., Callable[..., Any]] = aot_autograd(
        fw_compiler=compile_one(False), bw_compiler=compile_one(False), inference_compiler=compile_one(True)
    )
    return backend(module, example_inputs)


def run_pre_grad_stage(module: GraphModule) -> GraphModule:
    """Make `maybe_inplace` functional in a graph that Dynamo captured, in place, before AOTAutograd sees it.

    Raises:
        DonationError: A tensor is used after it was donated.
    """
    run_pre_grad(module.graph, donate_inputs=True)
    module.recompile()
    return module


def lower(
    module: GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    inference: bool = False,
    ir_op_priority: Mapping[str, Any] | None = None,
    ir_passes: Mapping[str, Sequence[Callable[[Graph], object]]] | None = None,
) -> GraphModule:
    """Lower all IR ops of a graph of torch overloads, for any backend that runs such graphs.

    Use it in an AOT backend's compiler, e.g. `aot_autograd(fw_compiler=lambda gm, args: ir.compiler.lower(gm, args))`.

    Args:
        module: The graph; changed in place. Nodes without a fake value in `meta["val"]` are given one.
        example_inputs: Its inputs, needed where fake values are missing.
        inference: True if nothing needs the inputs for a backward: only then donated inputs are overwritten.
        ir_op_priority: As the compile option of that name.
        ir_passes: As the compile option of that name.

    Returns:
        The same module, without IR ops.

    Raises:
        LoweringError: An implementation cannot be traced.
        ImplementationContractError: An implementation breaks its op's contract.
        PassError: `ir_passes` cannot be read.
        VerifyError: A pass failed, or left a graph that is broken.
    """
    return _lower(module, example_inputs, inference, ir_op_priority, read_passes(ir_passes))


def _lower(
    module: GraphModule,
    example_inputs: Sequence[Any],
    inference: bool,
    option_priority: Mapping[str, Any] | None,
    passes: Given,
) -> GraphModule:
    _give_values(module, example_inputs)
    attempt = Attempt.at(module.graph, Report(), nested=True)
    with one_report():
        _run_stages(module, attempt, inference, option_priority, passes)
    for each in module.modules():
        if isinstance(each, GraphModule):
            each.recompile()
    return module


def _run_stages(
    module: GraphModule, attempt: Attempt, inference: bool, option_priority: Mapping[str, Any] | None, passes: Given
) -> None:
    try:
        for kind in (PrePass, PostPass):
            stage = kind(option_priority, passes, inductor=False)
            for each in reversed(list(module.modules())):
                if isinstance(each, GraphModule):
                    stage(each.graph, inference and each is module)
    except IrError:
        attempt.restore()  # also what an earlier stage did, which was right as far as it went
        raise


def _give_values(module: GraphModule, example_inputs: Sequence[Any]) -> None:
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    if all("val" in node.meta for node in nodes if node.op == "placeholder" or node.op == "call_function"):
        return
    mode = torch._guards.detect_fake_mode(list(example_inputs)) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in example_inputs]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
