"""Exported programs: IR ops stay whole in them, and are lowered where the program runs."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler_support import lowered
from standard_calls import (
    HIDDEN,
    all_calls_and_providers,
    available,
    copies,
    expected,
    fake_providers,
    prefer,
    same,
)
from torch import Tensor
from torch.export import Dim

import irframework as ir

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, where it copies modules
STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not_strict"])
BACKENDS = pytest.mark.parametrize(
    "backend", ["irframework", "inductor", lowered], ids=["irframework", "stock", "lowered"]
)


@pytest.fixture(autouse=True, scope="module")
def _fakes() -> Iterator[None]:
    with fake_providers():
        yield


class Model(torch.nn.Module):
    """Every standard op; ops are attributes, one is donated to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("cache", torch.linspace(-1, 1, 64).view(8, 8))
        self.norm = ir.ops.rms_norm
        self.add = ir.ops.fused_add_rms_norm.maybe_inplace

    def forward(self, x: Tensor, r: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x, weight=self.weight, epsilon=1e-6)
        y, r = self.add(y, r * 1, self.weight, epsilon=1e-6)
        q, k = ir.ops.rotary_embedding(positions, y, r, self.cache, 16)
        return torch.cat((ir.ops.silu_and_mul(q), ir.ops.gelu_and_mul(k, "tanh")), -1), r


OPS = [
    "irframework.rms_norm.default",
    "irframework.fused_add_rms_norm.maybe_inplace",
    "irframework.rotary_embedding.default",
    "irframework.silu_and_mul.default",
    "irframework.gelu_and_mul.default",
]


def inputs(rows: int = 5) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    return torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.arange(rows) % 8


def ir_ops(module: Any) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if getattr(n.target, "namespace", "") == "irframework"]


def export(model: torch.nn.Module | None = None, *, strict: bool = False, dynamic: Any = None) -> Any:
    shapes = None if dynamic is None else {name: {0: dynamic} for name in ("x", "r", "positions")}
    with torch.no_grad():
        return torch.export.export(model or Model(), inputs(), strict=strict, dynamic_shapes=shapes)


DYNAMIC = pytest.mark.parametrize("dynamic", [None, Dim("rows", min=2, max=64), Dim.DYNAMIC, Dim.AUTO], ids=str)


@STRICT
@DYNAMIC
def test_programs_keep_the_ops_and_run(strict, dynamic):
    model = Model()
    program = export(model, strict=strict, dynamic=dynamic)
    assert ir_ops(program) == OPS
    for rows in (5,) if dynamic is None else (5, 2, 33):
        same(program.module()(*inputs(rows)), model(*inputs(rows)))


@STRICT
def test_decompositions_keep_the_ops(strict):
    model = Model()
    program = export(model, strict=strict, dynamic=Dim.DYNAMIC)
    for decomposed in (program.run_decompositions(), program.run_decompositions({})):
        assert ir_ops(decomposed) == OPS
        same(decomposed.module()(*inputs(9)), model(*inputs(9)))


@all_calls_and_providers()
def test_exported_then_lowered_equals_eager(call, provider):
    class One(torch.nn.Module):
        def forward(self, *arguments: Any) -> Any:
            return call.form(*arguments)

    available(provider)
    arguments = call.arguments(5)
    rows = {position: {dim: Dim.DYNAMIC} for position, dim in call.batch.items() if arguments[position] is not None}
    shapes = (tuple(rows.get(position) for position in range(len(arguments))),)
    with torch.no_grad():
        program = torch.export.export(One(), copies(arguments), dynamic_shapes=shapes)
        assert len(ir_ops(program)) == 1
        with prefer(provider):
            module = ir.compiler.lower(program.run_decompositions({}).module())
        assert ir_ops(module) == []
        for size in (5, 9):
            arguments = call.arguments(size)
            same(module(*copies(arguments)), expected(call, arguments))


@BACKENDS
def test_programs_are_compiled_for_the_priority_of_the_moment(backend):
    @ir.ops.silu_and_mul.register_impl("export_zeros", compiled_where=lambda x: False)
    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., : x.shape[-1] // 2])

    try:
        program = export(dynamic=Dim.DYNAMIC)
        function = torch.compile(program.module(), backend=backend)
        with torch.no_grad():
            assert function(*inputs(7))[0][:, : HIDDEN // 2].any()
            with ir.priority(silu_and_mul=["export_zeros"]):
                assert not function(*inputs(7))[0][:, : HIDDEN // 2].any()
            assert function(*inputs(7))[0][:, : HIDDEN // 2].any()
    finally:
        ir.ops.silu_and_mul.unregister_impl("export_zeros")


def test_lowering_a_programs_own_graph_module():
    model = Model()
    program = export(model, dynamic=Dim.DYNAMIC).run_decompositions({})
    module = ir.compiler.lower(program.graph_module, ir_op_priority={"rms_norm": ["nested"]})
    assert ir_ops(module) == []
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    states = [named[spec.target] for spec in program.graph_signature.input_specs if spec.target is not None]
    same(tuple(module(*states, *inputs(9))), model(*inputs(9)))


def test_an_input_that_is_donated_in_a_program_is_copied_by_lower():
    class Donating(torch.nn.Module):
        def forward(self, x: Tensor, r: Tensor, positions: Tensor) -> Any:
            return ir.ops.fused_add_rms_norm.maybe_inplace(x, r, None, 1e-6)

    program = export(Donating())
    with ir.priority(fused_add_rms_norm=["overwriting"]):
        module = ir.compiler.lower(program.module(), inputs(), inference=True)
    given = inputs()
    with torch.no_grad():
        same(module(*given), ir.ops.fused_add_rms_norm(*inputs()[:2], None, 1e-6))
    same(given, inputs())


def test_a_second_lowering_finds_nothing_to_do():
    module = ir.compiler.lower(export().run_decompositions({}).module())
    before = str(module.graph)
    assert str(ir.compiler.lower(module).graph) == before


def test_training_programs_have_gradients():
    model = Model()
    program = torch.export.export(model, inputs())
    want = torch.autograd.grad(model(*inputs())[0].sin().sum(), model.weight)
    module = program.module()
    got = torch.autograd.grad(module(*inputs())[0].sin().sum(), module.weight)
    torch.testing.assert_close(got, want)


# --- saved, and loaded by a new process ------------------------------------------------------------------------------


def in_new_process(code: str, *, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode != 0) is fails, done.stderr[-3000:]
    return done.stderr if fails else done.stdout


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.export.save(export(dynamic=Dim.DYNAMIC), tmp_path / "model.pt2")
    given = inputs(9)
    with torch.no_grad(), prefer("native"):
        torch.save((given, Model()(*given)), tmp_path / "expected.pt")
    return tmp_path


def test_a_saved_program_is_lowered_in_a_new_process_for_another_priority(saved):
    out = in_new_process(f"""
        import torch
        import irframework as ir

        @ir.ops.gelu_and_mul.register_impl("negative")
        def negative(x, approximate="none"):
            return -ir.ops.gelu_and_mul.native(x, approximate)

        program = torch.export.load({str(saved / "model.pt2")!r})
        given, want = torch.load({str(saved / "expected.pt")!r})
        assert any(n.target is ir.ops.rms_norm.torch_op for n in program.graph.nodes)
        half = want[0].shape[-1] // 2

        def check(got, sign):
            torch.testing.assert_close(got[0][:, :half], want[0][:, :half], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(got[0][:, half:], sign * want[0][:, half:], atol=1e-5, rtol=1e-5)

        with torch.no_grad():
            function = torch.compile(program.module(), backend="irframework")
            with ir.priority(gelu_and_mul=["native"]):
                check(program.module()(*given), 1)
                check(function(*given), 1)
            with ir.priority(gelu_and_mul=["negative"]):
                check(program.module()(*given), -1)
                check(function(*given), -1)
            module = ir.compiler.lower(program.module(), ir_op_priority={{"gelu_and_mul": ["negative"]}})
            check(module(*given), -1)
        assert not [n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "irframework"]
        print("right")
    """)
    assert out.strip() == "right"


def test_a_process_that_has_not_loaded_the_ops_is_told_which_one_is_missing(saved):
    error = in_new_process(f"import torch; torch.export.load({str(saved / 'model.pt2')!r})", fails=True)
    assert "failed to resolve torch.ops.irframework." in error
    assert "Please import the custom op" in error


def test_an_op_that_is_declared_nowhere_in_the_new_process_is_named(scale, tmp_path):
    class One(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x)

    torch.export.save(torch.export.export(One(), (torch.ones(2),)), tmp_path / "one.pt2")
    load = f"import torch, irframework.ops; torch.export.load({str(tmp_path / 'one.pt2')!r})"
    assert f"failed to resolve torch.ops.irframework.{scale.name}.default" in in_new_process(load, fails=True)


@pytest.mark.slow
def test_a_package_compiled_ahead_of_time_runs_for_every_size(tmp_path):
    model = Model()
    program = export(model, dynamic=Dim("rows", min=2, max=64))
    with torch.no_grad(), prefer("native"):  # kernels of a plugin would have to be loaded before the package
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save((inputs(9), tuple(model(*inputs(9)))), tmp_path / "expected.pt")
    out = in_new_process(f"""
        import sys, torch
        package = torch._inductor.aoti_load_package({path!r})
        given, want = torch.load({str(tmp_path / "expected.pt")!r})
        torch.testing.assert_close(tuple(package(*given)), want, atol=1e-5, rtol=1e-5)
        print("irframework" in sys.modules)
    """)
    assert out.strip() == "False"
