"""What the search for fused ops costs at compile time.

Two questions. How long does it take for a graph of 2,000 nodes that computes what the bodies of all fused ops compute,
with 60 definitions to look for (goal: under 150 ms of one core once the definitions are derived)? And which share is it
of the whole compile of a model of SmolLM2's shape, in a fresh process, as plain torch and with IR ops (goal: 3 %)?

The graph is as dense as can be: a decoder has one fused op for twenty nodes, this one for six. So the model's own graph
is searched a second time as well. Times are of this process's cores, not of the clock: read the shares, and the spread.

    python benchmarks/fusion_stage.py --repeats 9 --layers 30
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import irframework as ir
from irframework.compiler.fusable_ops import looked_for
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report
from irframework.compiler.shown_calls import generated_calls
from irframework.compiler.tracing import trace
from irframework.registry import all_ops

NODES, DEFINITIONS = 2000, 60
MODEL = "smollm2-135m"


def declare_more() -> None:
    """Declare fused ops until there are as many as asked for: a step of elements behind a norm and a product."""
    steps = [torch.tanh, torch.sigmoid, torch.exp, torch.sin, torch.cos, torch.relu, torch.sqrt, torch.rsqrt]
    for number in range(DEFINITIONS - len(looked_for())):
        first, second = steps[number % len(steps)], steps[number // len(steps)]

        def body(x: Tensor, weight: Tensor, epsilon: float, first: Any = first, second: Any = second) -> Tensor:
            return second(first(ir.ops.rms_norm(x, weight, epsilon)) * x)

        def native(x: Tensor, weight: Tensor, epsilon: float, body: Any = body) -> Tensor:
            return body(x, weight, epsilon)

        source = "def op(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:\n    return native(x, weight, epsilon)\n"
        scope: dict[str, Any] = {"Tensor": Tensor, "native": native}
        exec(source, scope)  # one function each
        op = ir.register_op(fuse=True, name=f"stage_{number}")(scope["op"])
        op.register_impl("stage")(scope["op"])


def graph_of_bodies() -> Graph:
    """A graph that computes, over and over, what the bodies of all fused ops compute."""
    calls = []
    for op in looked_for():
        arguments = next(iter(generated_calls(op)), None)
        if arguments is None:
            arguments = (torch.randn(6, 64), torch.randn(64), 1e-5)
        calls.append((op, arguments))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(a) for _, arguments in calls for a in arguments if isinstance(a, Tensor)]

    def program(rounds: int) -> Any:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            outputs: list[Tensor] = []
            for turn in range(rounds):
                rest = iter(given)
                for op, arguments in calls:
                    own = [next(rest) if isinstance(a, Tensor) else a for a in arguments]
                    own = [a.add(turn) if isinstance(a, Tensor) and a.is_floating_point() else a for a in own]
                    result = op.registered["native"].apply(tuple(own))
                    outputs += result if isinstance(result, (list, tuple)) else [result]
            return tuple(outputs)

        return run

    rounds = 1
    while True:
        graph = trace(program(rounds), inputs, mode).module.graph
        graph.eliminate_dead_code()
        if len(graph.nodes) >= NODES:
            return graph
        rounds += 1


def copied(graph: Graph) -> Graph:
    """The same graph, to be changed."""
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def seconds_to_fuse(graph: Graph) -> tuple[float, Report]:
    """Search a copy of a graph, and return the time of this process's cores."""
    copy, report = copied(graph), Report()
    gc.collect()
    began = time.process_time()
    with torch.no_grad():
        fuse(copy, report)
    return time.process_time() - began, report


def measure_graph(repeats: int) -> dict[str, Any]:
    """Search the graph of bodies, the first time and later."""
    all_ops()
    declare_more()
    graph = graph_of_bodies()
    first, report = seconds_to_fuse(graph)
    later = [1e3 * seconds_to_fuse(graph)[0] for _ in range(repeats)]
    return {
        "nodes": len(graph.nodes),
        "definitions": len(looked_for()),
        "fused": sum(report.fusions.values()),
        "missed": len(report.missed_fusions),
        "first_ms": 1e3 * first,
        "ms": {"median": statistics.median(later), "min": min(later), "max": max(later)},
        "ms_per_2000_nodes": statistics.median(later) * NODES / len(graph.nodes),
    }


def compile_model(layers: int, with_ops: bool) -> dict[str, Any]:
    """Compile one model in this process, from nothing, and say what the search was of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from irframework.compiler import pipeline
    from irframework.integrations.random_models import RANDOM_MODELS
    from irframework.integrations.transformers import apply

    kind, sizes = RANDOM_MODELS[MODEL]
    config = AutoConfig.for_model(kind, **{**sizes, "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config).eval()
    if with_ops:
        apply(model)
    spent: list[float] = []
    again: list[tuple[int, float]] = []
    search = pipeline.fuse

    def timed(graph: Graph, report: Report) -> None:
        copy = copied(graph)
        began = time.process_time()
        search(graph, report)
        spent.append(time.process_time() - began)
        again.append((len(copy.nodes), seconds_to_fuse(copy)[0]))

    pipeline.fuse = timed
    tokens = torch.randint(0, 1000, (1, 64))  # kernels on the CPU leave fewer rows to Inductor: nothing would be fused
    began, clock = os.times(), time.perf_counter()
    with torch.inference_mode(), torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(model, backend="irframework", dynamic=False)(tokens, use_cache=False)
    ended, clock = os.times(), time.perf_counter() - clock
    of_all = sum(ended[:4]) - sum(began[:4]) - sum(seconds for _, seconds in again)
    report = ir.last_report()
    assert report is not None
    share = sum(spent) / of_all
    nodes, seconds = max(again)
    return {
        "fuse_s": sum(spent),
        "compile_s": of_all,
        "clock_s": clock,
        "share": share,
        "fused": dict(report.fusions),
        "nodes": nodes,
        "again_ms": 1e3 * seconds,
    }


def measure_model(layers: int, with_ops: bool, repeats: int) -> dict[str, Any]:
    """Compile a model in fresh processes, one after the other."""
    command = [sys.executable, __file__, "--layers", str(layers), "--child", "ops" if with_ops else "plain"]
    found = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    shares = [100 * each["share"] for each in found]
    return {
        "model": f"{MODEL}, {layers} layers, {'IR ops' if with_ops else 'plain torch'}",
        "fused": found[0]["fused"],
        "nodes": found[0]["nodes"],
        "again_ms": statistics.median(each["again_ms"] for each in found),
        "fuse_s": statistics.median(each["fuse_s"] for each in found),
        "compile_s": statistics.median(each["compile_s"] for each in found),
        "share_percent": {"median": statistics.median(shares), "min": min(shares), "max": max(shares)},
    }


def main() -> None:
    """Measure and print, or print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="searches of the graph")
    parser.add_argument("--compiles", type=int, default=3, help="compiles of each model; 0: none")
    parser.add_argument("--layers", type=int, default=30, help="of the model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("plain", "ops"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(compile_model(options.layers, options.child == "ops")))
        return
    graph = measure_graph(options.repeats)
    kinds = (False, True) if options.compiles else ()
    models = [measure_model(options.layers, with_ops, options.compiles) for with_ops in kinds]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "graph": graph, "models": models}, indent=2))
        return
    print(f"torch {torch.__version__}, seconds of this process's cores")
    spread = "{median:.0f} ms ({min:.0f}-{max:.0f})".format(**graph["ms"])
    print(f"{graph['nodes']} nodes, {graph['definitions']} definitions, {graph['fused']} fused: {spread}", end="")
    print(f", {graph['ms_per_2000_nodes']:.0f} ms for 2,000 nodes; the first time {graph['first_ms']:.0f} ms")
    for row in models:
        share = "{median:.1f} % ({min:.1f}-{max:.1f})".format(**row["share_percent"])
        print(f"{row['model']}: {row['fuse_s']:.2f} s of {row['compile_s']:.1f} s, {share}; ", end="")
        print(f"{row['nodes']} nodes, {sum(row['fused'].values())} fused, searched again {row['again_ms']:.0f} ms")


if __name__ == "__main__":
    main()
