"""Programs with chains: what fusion makes of their graphs, against the very graphs as they were before.

Owns the ways from a program to a graph that cost little, and what is asked of a search beside what `comparing.py` asks
of every program: each output is what the graph without fusions computes, to the bit in half precision but for one or
two elements; it has the same strides; and nothing is computed more often than before, however many read it. A
difference counts if it shows for three sets of values: a code of float8 that is just on the edge between two is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import comparing
import torch
from comparing import DifferenceError, Tally
from functorch.compile import make_boxed_func
from programs import CODES, HALF, ROWS, Program, Written, arguments, other_values, storage
from providers import priorities, scope
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler.definitions import Definitions
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report
from irframework.torch_ops import op_of

VALUES = (11, 12, 13)
_CONSTANTS = ("table", "scales")
_SHOWS = {  # computes nothing that is worth counting
    "aten::alias", "aten::clone", "aten::copy_", "aten::detach", "aten::expand", "aten::full", "aten::full_like",
    "aten::permute", "aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::squeeze", "aten::t",
    "aten::transpose", "aten::unsqueeze", "aten::view", "aten::reshape", "aten::_to_copy", "aten::_unsafe_view",
    "aten::as_strided", "aten::scalar_tensor", "irframework::donate", "prims::convert_element_type",
}  # fmt: skip
_ALSO = {"aten::pow": "aten::mul", "aten::square": "aten::mul"}

# Which part of the elements, of 32 at least, may be a digit apart: two ways to compute in float32 are rounded apart by
# chance, once in 2^13 to bfloat16 and once in 2^10 to float16. A rounding that is left out shows in 3 of 100 codes.
_MAY_DIFFER = {torch.bfloat16: 1 / 32, torch.float16: 1 / 16}
_NOTHING = 2e-5  # GELU's tails, where one and a tangent cancel in float32, but not in a provider's float64


def check_fused(program: Program, backend: str, device: str = "cpu", tally: Tally | None = None) -> None:
    """Compare one program, fused, with eager native and with the same graph before fusion.

    Args:
        program: What to compare.
        backend: `lowered`: in one of three ways, without code generation; else as for `comparing.check`.
        device: Where the tensors are.
        tally: Counts.

    Raises:
        DifferenceError: With the source of the program.
    """
    tally = tally if tally is not None else Tally()
    if program.dtype in HALF and priorities(program.providers).get("fuzz_scale", [""])[0] == "twice":
        program = replace(
            program, providers=(program.providers[0], 0, *program.providers[2:])
        )  # it adds one and takes it
    for number, seed in enumerate(VALUES):
        try:
            with other_values(seed):
                _check(program, backend, device, tally if not number else Tally())
        except DifferenceError:
            if seed == VALUES[-1]:
                raise
            continue
        tally.counts["differ for one set of values"] += number > 0
        return


def way_of(program: Program) -> str:
    """How a program becomes a graph, and how far that goes.

    `searched`: the search alone, on a graph that writes in place where the program does; what is fused runs in eager
    mode. `written`: the same, lowered. `functional`: lowered, as AOTAutograd makes it. `dynamo`: through Dynamo, too.
    """
    if program.mode == "training" or program.shapes != "static" or any(each.kind == "break" for each in program.steps):
        return "dynamo"
    number = (60 * program.returns[0] + program.providers[0]) % 80
    return "dynamo" if number == 0 else "functional" if number < 6 else "written" if number < 15 else "searched"


def _check(program: Program, backend: str, device: str, tally: Tally) -> None:
    way = way_of(program)
    if backend != "lowered" or way == "dynamo":
        before = ir.last_report()
        comparing.check(program, "fused" if backend == "lowered" else backend, device, tally)
        _count_chains(program, device, before, tally)
        return
    with comparing.quiet():
        written = comparing.written_out(program, device)
        tally.counts["programs"] += 1
        if not written.chains:
            tally.counts["without a chain"] += 1
            return
        want = comparing.reference(program, written, scope(device, meanings=True), device, ROWS)
        if want is None:
            tally.counts["no meaning in eager"] += 1
            return
        module = None if way == "functional" else _written_graph(program, written, device)
        way = "functional" if module is None else way
        before = ir.last_report()
        try:
            with ir.priority(priorities(program.providers)):
                fused, unfused, report = _runs(way, module, program, written, device)
                seen = comparing.run(fused, program, arguments(program, device))
            comparing.differ(seen, want, written, f"fused, {way}")
            if unfused is not None:
                again = comparing.run(unfused, program, arguments(program, device))
                comparing.differ(seen, again, written, "fused against unfused", equal)
        except Exception as error:
            if way == "functional" and _fails_without_ops(program, written, want, device):
                tally.counts["torch's own fault"] += 1
                return
            title = f"way {way}, {program.mode}, {program.dtype}, {comparing.provider_names(program)}"
            raise DifferenceError(f"{comparing.first_lines(error)}\n{title}\n{written.source}{program!r}") from error
        comparing.count_report(report or (None if ir.last_report() is before else ir.last_report()), tally)
        for name in ("compared", f"compared: {way}", f"compared: {program.dtype}", "with chains"):
            tally.counts[name] += 1
        tally.counts["with donations"] += bool(written.donations)


def _count_chains(program: Program, device: str, before: Any, tally: Tally) -> None:
    with comparing.quiet():
        tally.counts["with chains"] += bool(comparing.written_out(program, device).chains)


# --- graphs ----------------------------------------------------------------------------------------------------------


def _function(written: Written, device: str, *, meanings: bool = False) -> tuple[Callable[..., Any], list[Tensor]]:
    """The program as a function that is also given the tensors that all programs refer to."""
    names = scope(device, meanings=meanings)
    source = written.source.replace("def f(", f"def f({', '.join(_CONSTANTS)}, ", 1)
    return comparing.function_of(source, names), [names[name] for name in _CONSTANTS]


Run = Callable[..., Any]


def _written_graph(program: Program, written: Written, device: str) -> GraphModule | None:
    """The program as a graph that writes in place, or None: torch decomposes no op with `out=`."""
    function, constants = _function(written, device)
    make = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")
    try:
        with torch.no_grad():
            module: GraphModule = make(*constants, *arguments(program, device).passed)
    except Exception:
        return None
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _runs(
    way: str, module: GraphModule | None, program: Program, written: Written, device: str
) -> tuple[Run, Run | None, Any]:
    """The fused graph, the graph as it was, and the report; no second graph where they are compared as they run."""
    function, constants = _function(written, device)
    if module is None:
        return (*_functional(function, constants), None)
    search = _searched if way == "searched" else fused_and_not
    fused, unfused, report = search(module, [*constants, *arguments(program, device).passed])
    return (
        lambda *passed: fused(*constants, *passed),
        lambda *passed: _natively(unfused, [*constants, *passed]),
        report,
    )


def _functional(function: Run, constants: list[Tensor]) -> tuple[Run, None]:
    """AOTAutograd's graph; it is compared with itself when it runs."""
    with torch.no_grad():
        fused = aot_function(
            function,
            fw_compiler=_side_by_side,
            inference_compiler=_side_by_side,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
    return lambda *passed: fused(*constants, *passed), None


def _fails_without_ops(program: Program, written: Written, want: comparing.Seen, device: str) -> bool:
    """Whether AOTAutograd gets the program wrong with torch functions in place of the ops, too.

    It does where arguments that share memory are written to: what Dynamo would have told apart.
    """
    function, constants = _function(written, device, meanings=True)
    plain = aot_function(function, fw_compiler=lambda graph, _: graph, keep_inference_input_mutations=True)
    try:
        with torch.no_grad():
            seen = comparing.run(lambda *passed: plain(*constants, *passed), program, arguments(program, device))
        comparing.differ(seen, want, written, "without ops")
    except Exception:
        return True
    return False


def through_dynamo(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs graphs fused and unfused, and compares."""

    def training(graph: GraphModule, given: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(ir.compiler.lower(graph, given).forward)

    ir.compiler.run_pre_grad_stage(module)
    backend = aot_autograd(
        fw_compiler=training,
        bw_compiler=training,
        inference_compiler=_side_by_side,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    found: Callable[..., Any] = backend(module, inputs)
    return found


comparing.BACKENDS["fused"] = through_dynamo
comparing.PLAIN["fused"] = "aot_eager"


def _side_by_side(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    fused, unfused, _ = fused_and_not(module, inputs)

    def run(*given: Any) -> Any:
        copies = _copies(given)
        want = _natively(unfused, copies)
        got = fused(*given)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            if isinstance(a, Tensor):
                equal(a, b, f"fused against unfused: output {index} of the graph")
        return got

    return make_boxed_func(run)


def _copies(given: Sequence[Any]) -> list[Any]:
    """Copies that share memory among themselves as the originals do."""
    copied: dict[int, Any] = {}
    found = []
    for each in given:
        if isinstance(each, Tensor):
            memory = copied.setdefault(storage(each), each.untyped_storage().clone())
            fresh = torch.empty(0, dtype=each.dtype, device=each.device)
            found.append(fresh.set_(memory, each.storage_offset(), each.size(), each.stride()))
        else:
            found.append(each)
    return found


def _natively(module: GraphModule, given: Sequence[Any]) -> Any:
    with ir.priority({op: ["native"] for op in ir.ops.__dir__() if hasattr(getattr(ir.ops, op, None), "impls")}):
        return module(*given)


def fused_and_not(module: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, GraphModule, Any]:
    """The graph lowered, with fusions, a copy of it as it was, and the report, if there is one.

    Raises:
        DifferenceError: The fused graph computes something more often.
    """
    unfused = _copied(module)
    after: Counter[str] = Counter()
    before = ir.last_report()
    fused = ir.compiler.lower(
        module, inputs, inference=True, ir_passes={"after_fusion": [lambda graph: after.update(work(graph))]}
    )
    report = ir.last_report()
    if report is before:
        return fused, unfused, None
    _no_more_work(after, unfused.graph, report)
    return fused, unfused, report


def _searched(module: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, GraphModule, Any]:
    unfused, report = _copied(module), Report()
    fuse(module.graph, report)
    module.graph.lint()
    module.recompile()
    _no_more_work(work(module.graph), unfused.graph, report)
    return module, unfused, report


def _copied(module: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


def _no_more_work(after: Counter[str], unfused: Graph, report: Any) -> None:
    if report.fusions:
        more = after - work(unfused)
        if more:
            raise DifferenceError(f"computed more often: {dict(more)}, with fusions {report.fusions}\n{unfused}")


def work(graph: Graph) -> Counter[str]:
    """What a graph computes, and how often: its IR ops by what they are made of."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not node.users:
            continue
        known = op_of(target)
        if known is not None and known[0].fuse:
            op = known[0]
            given = [_value(argument) for argument in op.bind(node.args, node.kwargs)]
            expansion = Definitions().expand(op, given, None)
            if expansion is not None:
                found.update(work(expansion.graph))
                continue
        name = target._schema.name
        is_one = name == "aten::mul" and node.args[1] in (1, 1.0)
        if name not in _SHOWS and not is_one:
            found[_ALSO.get(name, name)] += 1
    return found


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument


# --- comparing -------------------------------------------------------------------------------------------------------


def equal(a: Tensor, b: Tensor, what: str) -> None:
    """Raise unless two tensors are laid out alike and hold the same, but for the last digits that float32 shows."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise DifferenceError(f"{what}: {a.dtype} {tuple(a.shape)}, unfused {b.dtype} {tuple(b.shape)}")
    strides = [(m, n) for m, n, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1 and m != n]
    if strides and a.numel():
        raise DifferenceError(f"{what}: strides {a.stride()}, unfused {b.stride()}")
    a, b = a.detach(), b.detach()
    if a.dtype in CODES or str(a.dtype).removeprefix("torch.") in HALF:
        apart = (a.double() - b.double()).abs()
        unequal = int(((a != b) & ~(apart <= _NOTHING)).sum())
        if unequal <= _MAY_DIFFER.get(a.dtype, 0) * max(a.numel(), 32):
            return
        what = f"{what}: {unequal} of {a.numel()} are not the same"
        raise DifferenceError(f"{what}\ngot  {a.flatten()[:12].tolist()}\nwant {b.flatten()[:12].tolist()}")
    torch.testing.assert_close(
        a,
        b,
        rtol=2e-4,  # also in float64, where a program may come from float32
        atol=_NOTHING,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}\ngot  {a.flatten()[:12].tolist()}\nwant {b.flatten()[:12].tolist()}",
    )
