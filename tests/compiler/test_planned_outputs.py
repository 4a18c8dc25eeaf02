"""Kernels with an `.out` overload: Inductor gives them planned buffers, whatever the shapes and the signature."""

import itertools

import pytest
import torch
from compiler_support import report, run
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import irframework as ir
from irframework.errors import InvalidOpError
from irframework.out_variants import out_variant_of

_numbers = itertools.count()


class OutKernel:
    """A functional torch op with an `.out` overload, and an op whose provider `out` calls it."""

    def __init__(self, schema: str, function, native, call, torchs_own=False):
        number = next(_numbers)
        self.library = torch.library.Library(f"tpo{number}", "DEF")
        self.library.define(f"k{schema}")
        torch.library.register_fake(f"tpo{number}::k", function, lib=self.library)
        self.library.impl("k", function, "CompositeExplicitAutograd")
        if torchs_own:
            arguments = schema.removeprefix("(").partition(")")[0]
            text = f"k.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)"
            self.library.define(text, tags=(torch.Tag.out,))
            torch.library.register_fake(f"tpo{number}::k.out", lambda *_, out: out, lib=self.library)
        else:
            self.out = ir.define_out_variant(self.library, "k")
        self.filled = 0

        def fill(*args, **kwargs):
            self.filled += 1
            names = [name for name in kwargs if name.startswith("out")]
            given = tuple(kwargs.pop(name) for name in names)
            results = function(*args, **kwargs)
            for buffer, result in zip(given, results if isinstance(results, tuple) else (results,), strict=True):
                buffer.copy_(result)
            return given[0] if torchs_own else None

        self.library.impl("k.out", fill, "CompositeExplicitAutograd")
        kernel = getattr(torch.ops, self.library.ns).k
        self.op = ir.register_op(name=f"tpo_{number}")(native)
        implementation = call(kernel)
        self.op.register_impl("out")(implementation)


def one_output(schema="(Tensor x, Tensor? w, float e) -> Tensor", function=None, call=None, **options):
    def native(x: Tensor, w: Tensor | None, e: float) -> Tensor:
        return x * e if w is None else x * w * e

    def default_call(kernel):
        def out(x, w, e):
            return kernel(x, w, e)

        return out

    return OutKernel(schema, function or native, native, call or default_call, **options)


def number_first(**options):
    def call(kernel):
        def out(x, w, e):
            return kernel(x, e, w)

        return out

    return one_output("(Tensor x, float e, Tensor? w) -> Tensor", lambda x, e, w: x * w * e, call, **options)


def two_outputs():
    def native(x: Tensor, w: Tensor | None, e: float) -> tuple[Tensor, Tensor]:
        return x * w * e, x + e

    def call(kernel):
        def out(x, w, e):
            return kernel(x, w, e)

        return out

    return OutKernel("(Tensor x, Tensor? w, float e) -> (Tensor, Tensor)", native, native, call)


def rectangular():
    """An output whose size is computed from that of the input."""

    def native(x: Tensor, w: Tensor | None, e: float) -> Tensor:
        return (x[..., : x.shape[-1] // 2] * e).contiguous()

    def call(kernel):
        def out(x, w, e):
            return kernel(x, w, e)

        return out

    return OutKernel("(Tensor x, Tensor? w, float e) -> Tensor", native, native, call)


def compiled(kernel, *, dynamic=False, weight=True, backend="irframework", **patches):
    """Compile a call between plain torch ops; return the code, after comparing with native."""
    x, w = torch.randn(4, 8), torch.randn(8)

    def f(x, w):
        result = kernel.op(x.t().contiguous().t().contiguous(), w if weight else None, 2.0)
        return result

    with torch.no_grad(), config.patch(fx_graph_cache=False, **patches), ir.priority({kernel.op.name: ["out"]}):
        got, code = run_and_get_code(torch.compile(f, backend=backend, dynamic=dynamic), x, w)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
    want = kernel.op.native(x, w if weight else None, 2.0)
    torch.testing.assert_close(got, want)
    assert "irframework" not in list(report().graphs.values())[-1]
    return code[0]


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [one_output, number_first, two_outputs, rectangular])
def test_inductor_plans_the_outputs(make, dynamic, backend):
    kernel = make()
    assert ".k.out(" in compiled(kernel, dynamic=dynamic, backend=backend)
    assert kernel.filled == 1


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="Inductor rewrites such calls from torch 2.13 on")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [one_output, number_first])
def test_overloads_of_torchs_own_convention_work_where_torch_fails(make, dynamic):
    kernel = make(torchs_own=True)
    assert ".k.out(" in compiled(kernel, dynamic=dynamic)
    assert kernel.filled == 1


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="Inductor rewrites such calls from torch 2.13 on")
def test_torch_still_fails_for_symbolic_sizes_by_itself(monkeypatch):
    monkeypatch.setattr("irframework.compiler.planned_outputs._torch_does_it_right", lambda *_: True)
    with pytest.raises(Exception, match="LoweringException"):
        compiled(one_output(torchs_own=True), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_optional_tensor_may_be_left_out(dynamic):
    assert ".k.out(" in compiled(one_output(), dynamic=dynamic, weight=False)


def test_buffers_are_reused_between_kernels():
    kernel = one_output()

    def chain(x, w):
        for _ in range(4):
            x = kernel.op(x, w, 2.0)
        return x

    with torch.no_grad(), config.patch(fx_graph_cache=False), ir.priority({kernel.op.name: ["out"]}):
        _, code = run_and_get_code(torch.compile(chain), torch.randn(4, 8), torch.randn(8))
    assert code[0].count("= empty_strided_cpu(") == 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [one_output, two_outputs])
def test_cpp_wrapper_code_calls_the_overload(make):
    kernel = make()
    compiled(kernel, cpp_wrapper=True)
    assert kernel.filled == 1


@pytest.mark.parametrize("make", [one_output, number_first, two_outputs, rectangular])
def test_other_compilers_get_the_functional_op(make):
    kernel = make()
    x, w = torch.randn(4, 8), torch.randn(8)
    with ir.priority({kernel.op.name: ["out"]}):
        got = run(lambda x, w: kernel.op(x, w, 2.0), x, w)
    torch.testing.assert_close(got, kernel.op.native(x, w, 2.0))
    assert ".k.default(" in list(report().graphs.values())[-1]


def test_gradients_flow_past_the_overload():
    kernel = one_output()
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    with ir.priority({kernel.op.name: ["out"]}):
        torch.compile(lambda x: kernel.op(x, w, 2.0))(x).sum().backward()
    torch.testing.assert_close(x.grad, (w * 2).expand(4, 8))


@pytest.mark.parametrize(
    ("schema", "what"),
    [("(Tensor(a!) x) -> ()", "not functional"), ("(Tensor x) -> int", "not functional"), (None, "no torch op")],
)
def test_only_functional_ops_can_have_one(schema, what):
    library = torch.library.Library(f"tpo{next(_numbers)}", "DEF")
    if schema:
        library.define(f"k{schema}")
    with pytest.raises(InvalidOpError, match=what):
        ir.define_out_variant(library, "k")


def test_the_overload_is_found_by_the_functional_op():
    kernel = one_output()
    functional = getattr(torch.ops, kernel.library.ns).k.default
    assert out_variant_of(functional) == kernel.out
    assert out_variant_of(kernel.out) is None
    assert out_variant_of(torch.ops.aten.add.Tensor) is None


@pytest.mark.parametrize("index", [0, 1])
def test_an_output_that_nothing_reads_is_allocated(index):
    kernel = two_outputs()
    x, w = torch.randn(4, 8), torch.randn(8)
    with ir.priority({kernel.op.name: "out"}):
        got = run(lambda x, w: kernel.op(x, w, 2.0)[index], x, w, backend="irframework")
    torch.testing.assert_close(got, kernel.op.native(x, w, 2.0)[index])
