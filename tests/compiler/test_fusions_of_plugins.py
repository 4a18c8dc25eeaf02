"""Fused ops that plugins bring through the ordinary hooks: found, fused, explained, and gone with their plugin."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from distributions import answer, run_python, write_distribution

# One distribution: three ops, an op fused from them, and a kernel for that. The three are declared with `fuse` so that
# plain torch is known as them; they have no kernels of their own. The kernel's product has a value that the
# definition does not, so that its use can be seen.
CHAIN = """
    import torch
    from torch import Tensor

    @ir.hookimpl
    def irframework_register_ops():
        @ir.register_op(fuse=True)
        def acme_turn(x: Tensor, by: float) -> Tensor:
            return torch.sin(x) * by

        @ir.register_op(fuse=True)
        def acme_lift(x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @ir.register_op(fuse=True)
        def acme_cut(x: Tensor, low: float = 0.0) -> Tensor:
            return torch.relu(x) - low

        @ir.register_op(fuse=True)
        def acme_chain(x: Tensor, by: float, bias: Tensor, low: float = 0.0) -> Tensor:
            return acme_cut(acme_lift(acme_turn(x, by), bias), low)
"""
KERNEL = """
    import torch

    @ir.hookimpl
    def irframework_register_impls():
        @ir.ops.acme_chain.register_impl("{provider}"{condition})
        def chain(x, by, bias, low=0.0):
            return x * 0 + {value}
"""
PROGRAM = """
    import json, torch, irframework as ir
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(f, *arguments, **chosen):
        with torch.no_grad(), ir.priority({name: [provider] for name, provider in chosen.items()}):
            graph = make_fx(f, tracing_mode="fake", decomposition_table=select_decomp_table())(*arguments)
            module = ir.compiler.lower(graph, inference=True)
        got = module(*arguments)
        report = ir.last_report()
        return [got.float().unique().tolist()[:1], report.fusions,
                sorted({miss.reason for miss in report.missed_fusions if miss.op == "acme_chain"})]

    def by_ops(x, bias):
        return ir.ops.acme_cut(ir.ops.acme_lift(ir.ops.acme_turn(x, 3.0), bias), 0.5)

    def by_torch(x, bias):
        return torch.relu(torch.sin(x) * 3.0 + bias) - 0.5

    x, bias = torch.ones(2, 4), torch.full((4,), 2.0)
    wanted = [round(float(by_torch(x, bias)[0, 0]), 4)]
"""


@pytest.fixture
def installed(tmp_path):
    """Installs distributions, and runs a program beside them."""

    def run(code, **variables):
        text = PROGRAM + "".join(f"    {line}\n" for line in code.splitlines())
        return answer(run_python(text, tmp_path, ("torch", "torch._inductor.compile_fx"), **variables))

    run.write = lambda name, body: write_distribution(tmp_path, name, body)
    return run


def kernel(provider="acme", value=7, condition=""):
    return KERNEL.format(provider=provider, value=value, condition=condition and f", supports_args={condition}")


def test_a_fused_op_of_a_plugin_that_spans_three_ops_is_found_fused_and_explained(installed):
    installed.write("acme", CHAIN + kernel())
    found = installed(
        "decision = ir.explain('acme_chain', x, 3.0, bias, 0.5)\n"
        "(plugin,) = [each for each in ir.plugins() if each.status == 'loaded']\n"
        "native = run(by_ops, x, bias, acme_chain='native')\n"
        "print(json.dumps([run(by_ops, x, bias), run(by_torch, x, bias), native, decision.provider,\n"
        "                  list(plugin.providers), list(plugin.ops), wanted]))"
    )
    by_ops, by_torch, native, provider, providers, ops, wanted = found
    assert by_ops == by_torch == [[7.0], {"acme_chain": 1}, []]
    assert (native[0][0], native[1]) == (pytest.approx(wanted[0], abs=1e-4), {})
    assert any("native" in reason for reason in native[2])
    assert (provider, providers) == ("acme", ["acme"])
    assert ops == ["acme_chain", "acme_cut", "acme_lift", "acme_turn"]


def test_what_its_kernel_declines_is_not_fused_and_the_reason_is_told(installed):
    installed.write("acme", CHAIN + kernel(condition="ir.supports(dtype=torch.bfloat16)"))
    value, fusions, missed = installed("print(json.dumps(run(by_ops, x, bias)))")
    assert (value, fusions) == ([pytest.approx(4.0244, abs=1e-3)], {})
    assert any("bfloat16" in reason for reason in missed)


def test_a_disabled_plugin_takes_its_fused_op_along(installed):
    installed.write("acme", CHAIN + kernel())
    found = installed(
        "print(json.dumps([run(by_torch, x, bias), wanted, 'acme_chain' in ir.ops.__dir__()]))",
        IRFRAMEWORK_PLUGINS="",
    )
    (value, fusions, missed), wanted, known = found
    assert (value, fusions, missed, known) == ([pytest.approx(wanted[0], abs=1e-4)], {}, [], False)


@pytest.mark.parametrize("hook", ["irframework_register_impls()", "irframework_default_priorities(platform, mode)"])
def test_a_quarantined_plugin_takes_its_fused_op_along(installed, hook):
    failing = f"\n@ir.hookimpl\ndef {hook}:\n    raise RuntimeError('boom')\n".replace("\n", "\n    ")
    installed.write("acme", CHAIN + (kernel() if "defaults" in hook else "") + failing)
    found = installed(
        "status = [each.status for each in ir.plugins() if each.name == 'acme']\n"
        "print(json.dumps([run(by_torch, x, bias), wanted, status]))"
    )
    (value, fusions, missed), wanted, status = found
    assert (value, fusions, missed, status) == ([pytest.approx(wanted[0], abs=1e-4)], {}, [], ["quarantined"])


def test_a_plugin_that_is_quarantined_between_two_compiles_is_not_fused_into_any_more(installed):
    late = """
    calls = []

    @ir.hookimpl
    def irframework_default_priorities(platform, mode):
        if "fail" in calls:
            raise RuntimeError("boom")
    """
    installed.write("acme", CHAIN + kernel() + late)
    found = installed(
        "import acme\n"
        "first = run(by_torch, x, bias)\n"
        "acme.calls.append('fail')\n"
        "ir.configure(ir.KernelConfig())\n"
        "print(json.dumps([first, run(by_torch, x, bias), run(by_torch, x, bias), wanted]))"
    )
    first, *later, wanted = found
    assert first == [[7.0], {"acme_chain": 1}, []]
    assert later == [[[pytest.approx(wanted[0], abs=1e-4)], {}, []]] * 2


def test_two_plugins_bring_kernels_for_one_fused_op_each_for_its_dtype(installed):
    installed.write("acme", CHAIN)
    installed.write("brand-half", kernel("brand_half", 8, "ir.supports(dtype=torch.bfloat16)"))
    installed.write("brand-single", kernel("brand_single", 9, "ir.supports(dtype=torch.float32)"))
    found = installed(
        "pairs = [(x.to(d), bias.to(d)) for d in (torch.bfloat16, torch.float32, torch.float64)]\n"
        "print(json.dumps([run(by_ops, *pair) for pair in pairs]))"
    )
    half, single, double = found
    assert half == [[8.0], {"acme_chain": 1}, []]
    assert single == [[9.0], {"acme_chain": 1}, []]
    assert (double[0], double[1]) == ([pytest.approx(4.0244, abs=1e-3)], {})
    assert any("brand_half" in reason and "brand_single" in reason for reason in double[2])


def test_a_pass_of_another_plugin_sees_the_fused_op(installed):
    installed.write("acme", CHAIN + kernel())
    watch = """
    seen = {}

    def watch_before(graph):
        seen["before"] = "irframework.acme_chain.default" in [str(node.target) for node in graph.nodes]

    def watch_after(graph):
        seen["after"] = "irframework.acme_chain.default" in [str(node.target) for node in graph.nodes]

    @ir.hookimpl
    def irframework_passes(stage):
        return {"before_fusion": [watch_before], "after_fusion": [watch_after]}.get(stage)
    """
    installed.write("watcher", watch)
    found = installed("import watcher\nrun(by_torch, x, bias)\nprint(json.dumps(watcher.seen))")
    assert found == {"before": False, "after": True}
