"""What torch offers around compiling: whole graphs and broken ones, subclasses, modes, transforms, copies, traces."""

import copy
import io
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiler_support import lowered, run, tensors
from standard_calls import (
    HIDDEN,
    all_calls,
    all_calls_and_providers,
    available,
    copies,
    expected,
    fake_providers,
    only,
    prefer,
    same,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import irframework as ir
from irframework.optional_outputs import filled

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
BACKENDS = pytest.mark.parametrize("backend", ["irframework", "inductor"])
TRACERS = pytest.mark.parametrize("backend", ["eager", "aot_eager", lowered], ids=["eager", "aot_eager", "lowered"])


@pytest.fixture(autouse=True, scope="module")
def _fakes() -> Iterator[None]:
    with fake_providers():
        yield


def ir_ops(module: Any) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if getattr(n.target, "namespace", "") == "irframework"]


class Model(torch.nn.Module):
    """Holds an op, a `maybe_inplace` and an implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.norm = ir.ops.rms_norm
        self.add = ir.ops.fused_add_rms_norm.maybe_inplace
        self.impl = ir.ops.silu_and_mul.impls["native"]

    def forward(self, x: Tensor) -> Tensor:
        y, r = self.add(x * 1, x + 1, self.weight, epsilon=1e-6)
        return self.norm(y, self.weight, 1e-6) + r


def rows(count: int = 4) -> Tensor:
    torch.manual_seed(count)
    return torch.randn(count, HIDDEN)


# --- one graph, and several ------------------------------------------------------------------------------------------


@all_calls_and_providers()
def test_every_form_is_one_whole_graph(call, provider):
    arguments = call.arguments(3)
    with prefer(available(provider)):
        same(run(lambda *a: call.form(*a), *copies(arguments), fullgraph=True), expected(call, arguments))
        as_torch_sees = filled(call.op, expected(call, arguments), call.op.bind(arguments))
        same(run(lambda *a: call.form.torch_op(*a), *copies(arguments), fullgraph=True), as_torch_sees)


MISTAKES = {
    "shape": (lambda x: ir.ops.rms_norm(x, torch.ones(3), 1e-6), "argument 'weight' must be a vector as long as a row"),
    "dtype": (lambda x: ir.ops.silu_and_mul(x.int()), "argument 'x' must have a floating-point dtype"),
    "word": (lambda x: ir.ops.gelu_and_mul(x, "nope"), "approximate must be 'none' or 'tanh', got 'nope'"),
    "residual": (lambda x: ir.ops.fused_add_rms_norm(x, x[1:], None, 1e-6), "argument 'x_residual' has shape"),
    "donating": (lambda x: ir.ops.rms_norm.maybe_inplace(x, None, 1e-6), "has no maybe_inplace form"),
    "type": (
        lambda x: ir.ops.rms_norm(x, 3, 1e-6),
        "Optional[Tensor]' for argument 'weight' but instead found type 'int'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_mistake_in_a_whole_graph_says_what_is_wrong_and_where(mistake, fullgraph, caplog):
    function, said = MISTAKES[mistake]
    with pytest.raises(Exception) as caught:
        run(function, rows(), fullgraph=fullgraph)
    assert said in str(caught.value)
    if fullgraph:
        assert "test_surroundings.py" in str(caught.value)


def test_graph_breaks_between_ops():
    def broken(x: Tensor, w: Tensor) -> Tensor:
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, x * 2, w, 1e-6)
        torch._dynamo.graph_break()
        y = ir.ops.rms_norm(y, w, 1e-6)
        torch._dynamo.graph_break()
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(y, r, w, 1e-6)
        return y + r

    x, w = rows(), torch.ones(HIDDEN)
    for provider in ("native", "overwriting", "nested"):
        with prefer(provider):
            same(run(broken, x, w), broken(x, w))
    torch._dynamo.reset()
    assert torch._dynamo.explain(broken)(x, w).graph_break_count == 2


def test_ops_in_a_loop_that_breaks():
    def looping(x: Tensor, w: Tensor) -> Tensor:
        r = x * 1
        for number in range(4):
            x, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, r, w, 1e-6)
            if number % 2:
                torch._dynamo.graph_break()
        return x + r

    x, w = rows(), torch.ones(HIDDEN)
    with prefer("overwriting"):
        same(run(looping, x.clone(), w), looping(x.clone(), w))


def test_a_value_decides_which_op_runs():
    def deciding(x: Tensor) -> Tensor:
        return ir.ops.silu_and_mul(x) if x.sum() > 0 else ir.ops.gelu_and_mul(x)

    function = torch.compile(deciding, backend=lowered)
    for x in (torch.ones(2, 8), -torch.ones(2, 8)):
        same(function(x), deciding(x))


def test_a_branch_of_torch_cond():
    def choosing(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: ir.ops.rms_norm(x, w, 1e-6), lambda x: x + 1, (x,))

    w = torch.full((HIDDEN,), 2.0)
    for x in (torch.ones(2, HIDDEN), -torch.ones(2, HIDDEN)):
        with torch.no_grad():
            want = ir.ops.rms_norm.native(x, w, 1e-6) if x.sum() > 0 else x + 1
        same(run(choosing, x, w, backend="irframework"), want)


def test_a_users_own_mutating_op_is_left_alone(add):
    """It stands between IR ops, and overwrites what they return and what they read later."""
    library = torch.library.Library(f"{add.library.ns}_user", "DEF")
    library.define("double_(Tensor(a!) x) -> ()")

    def kernel(x: Tensor) -> None:
        x.mul_(2)

    library.impl("double_", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::double_", lambda x: None, lib=library)
    double = getattr(torch.ops, library.ns).double_

    def function(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y, r = add.op(x, r, w)
        double(r)
        double(x)
        y, r = add.op.maybe_inplace(y, r, w)
        double(y)
        return y + r + x

    for backend in (lowered, "irframework", "inductor"):
        given, wanted = tensors((4, 8), (4, 8), (8,)), None
        wanted = [t.clone() for t in given]
        with add.priority("inp"):
            got = run(function, *given, backend=backend)
        with add.priority("native"):
            same(got, function(*wanted))
        same(given, wanted)


def test_compile_time_grows_with_the_number_of_layers_and_no_faster(scale):
    """Nothing of ours looks at the whole graph once per op, and no message spells out the graph."""

    def layers(count: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            for _ in range(count):
                x = scale(x).sin()
            return x

        return function

    def seconds(count: int) -> float:
        torch._dynamo.reset()
        began = time.process_time()
        run(layers(count), torch.ones(4))
        return time.process_time() - began

    seconds(5)
    short = min(seconds(50) for _ in range(2))
    assert seconds(200) < 4 * short * 2


@pytest.mark.slow
def test_two_hundred_opaque_ops_compile_in_linear_time(scale, monkeypatch):
    """Left to Inductor as they are: its fallback must not print the expression tree for each."""
    monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", "lower_functional,lower_inplace")
    seconds = {}
    for count in (40, 200):

        def function(x: Tensor, count: int = count) -> Tensor:
            for _ in range(count):
                x = scale(x).sin()
            return x

        began = time.process_time()
        with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
            torch.compile(function, backend="inductor")(torch.ones(4))
        seconds[count] = time.process_time() - began
        torch._dynamo.reset()
    assert seconds[200] < 5 * seconds[40] * 2


# --- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x,
    "rows_apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda x: x[:1].expand(x.shape),
    "offset": lambda x: torch.cat((x, x), 0)[x.shape[0] :],
}


@all_calls_and_providers()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_outputs_have_the_strides_of_the_fake_ones(call, provider, layout):
    arguments = tuple(
        LAYOUTS[layout](a) if position in call.batch and isinstance(a, Tensor) and a.dim() > 1 else a
        for position, a in enumerate(call.arguments(5))
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = call.form(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    want = expected(call, arguments)
    with torch.no_grad(), prefer(available(provider)):
        outputs = call.form(*arguments)
    same(outputs, want)
    for fake, output in zip(*((v if isinstance(v, tuple) else (v,)) for v in (fakes, outputs)), strict=True):
        if fake is None or output is None:
            assert fake is output
        else:
            assert (fake.shape, fake.dtype, fake.stride()) == (output.shape, output.dtype, output.stride())


# --- subclasses ------------------------------------------------------------------------------------------------------


class Wrapper(Tensor):
    """A tensor that holds another one and sees every op."""

    seen: list[str] = []  # noqa: RUF012 - one list for the test

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # torch prints tensors where its trace is on
        return f"Wrapper({self.inner!r})"

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Wrapper":
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        args, kwargs = tree_map(lambda a: a.inner if isinstance(a, Wrapper) else a, (args, kwargs or {}))
        return tree_map(lambda y: Wrapper(y) if isinstance(y, Tensor) else y, func(*args, **kwargs))


def test_a_wrapper_subclass_sees_the_op_itself():
    Wrapper.seen.clear()
    with torch.no_grad():
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(Wrapper(rows()), Wrapper(rows()), None, 1e-6)
        y = ir.ops.rms_norm(y, None, 1e-6)
    assert Wrapper.seen == ["irframework.fused_add_rms_norm.maybe_inplace", "irframework.rms_norm.default"]
    same((y.inner, r.inner), (ir.ops.rms_norm(ir.ops.rms_norm(rows() * 2, None, 1e-6), None, 1e-6), rows() * 2))


@pytest.mark.parametrize("backend", ["aot_eager", lowered, "irframework", "inductor"])
def test_a_wrapper_subclass_compiles(backend):
    def function(x: Tensor, r: Tensor, w: Tensor) -> Any:
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6)
        return ir.ops.rms_norm(y, w, 1e-6) * 2, r

    w = torch.ones(HIDDEN)
    with prefer("overwriting"):
        got = run(function, Wrapper(rows()), Wrapper(rows()), w, backend=backend, fullgraph=True)
    assert all(isinstance(t, Wrapper) for t in got)
    same(tuple(t.inner for t in got), function(rows(), rows(), w))


class Noting(Tensor):
    """A tensor whose class sees torch functions."""

    seen: list[Any] = []  # noqa: RUF012 - one list for the test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_function_subclass_sees_the_op_and_stays_itself():
    Noting.seen.clear()
    y = ir.ops.rms_norm(rows().as_subclass(Noting), None, 1e-6)
    assert type(y) is Noting
    assert Noting.seen == [ir.ops.rms_norm.torch_op]


@BACKENDS
def test_a_function_subclass_compiles(backend):
    with prefer("native"):  # at run time torch 2.13 refuses every opaque op, anybody's, on such a subclass
        y = run(lambda x: ir.ops.rms_norm(x, None, 1e-6) * 2, rows().as_subclass(Noting), backend=backend)
    assert type(y) is Noting
    same(y.as_subclass(Tensor), ir.ops.rms_norm(rows(), None, 1e-6) * 2)


class OwnParameter(torch.nn.Parameter):
    """A Parameter with a class of its own."""


@TRACERS
def test_a_parameter_subclass_has_its_gradient(backend):
    weight = OwnParameter(torch.linspace(0.5, 1.5, HIDDEN))
    x = rows()
    want = torch.autograd.grad(ir.ops.rms_norm.native(x, weight, 1e-6).sin().sum(), weight)
    same(torch.autograd.grad(ir.ops.rms_norm(x, weight, 1e-6).sin().sum(), weight), want)
    function = torch.compile(lambda x: ir.ops.rms_norm(x, weight, 1e-6), backend=backend)
    same(torch.autograd.grad(function(x).sin().sum(), weight), want)


# --- modes and tracers -----------------------------------------------------------------------------------------------


@all_calls()
def test_fake_tensors_in_and_out(call):
    arguments = call.arguments(3)
    want = expected(call, arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = call.form(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    for fake, real in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
        if fake is None or real is None:
            assert fake is real
            continue
        assert type(fake) is FakeTensor
        assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
            real.shape,
            real.dtype,
            real.device,
            real.stride(),
        )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_whole_ops_and_lowers(mode):
    def function(x: Tensor, r: Tensor) -> Any:
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, r * 1, None, 1e-6)
        return ir.ops.silu_and_mul(ir.ops.rms_norm(y, None, 1e-6)), r

    traced = make_fx(function, tracing_mode=mode)(rows(), rows())
    assert ir_ops(traced) == [
        "irframework.fused_add_rms_norm.maybe_inplace",
        "irframework.rms_norm.default",
        "irframework.silu_and_mul.default",
    ]
    same(traced(rows(), rows()), function(rows(), rows()))
    with prefer("nested"):
        ir.compiler.lower(traced, [rows(), rows()])
    assert ir_ops(traced) == []
    for count in (4, 9) if mode == "symbolic" else (4,):
        same(tuple(traced(rows(count), rows(count))), function(rows(count), rows(count)))


def test_symbolic_trace_of_a_module_that_holds_ops():
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    assert ir_ops(traced) == ["irframework.fused_add_rms_norm.maybe_inplace", "irframework.rms_norm.default"]
    same(traced(rows()), model(rows()))
    same(ir.compiler.lower(traced, [rows()])(rows()), model(rows()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is deprecated as a whole
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # conditions look at sizes, which it does not record
def test_jit_trace_records_what_ran():
    model = Model()
    with torch.no_grad():
        model(rows())
        traced = torch.jit.trace(model, (rows(),))
    same(traced(rows(9)), model(rows(9)))


@BACKENDS
def test_inference_mode_before_and_after_a_compile(backend):
    model = Model()
    want = model(rows()).detach()
    function = torch.compile(model, backend=backend)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode(), prefer("overwriting"):
            same(function(rows()).detach(), want)


def test_a_flop_counter_sees_the_op():
    counted = {torch.ops.irframework.rms_norm: lambda x, *rest, out_shape=None, **kw: 4 * x[0] * x[1]}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter, torch.no_grad():
        ir.ops.rms_norm(rows(), None, 1e-6)
        Model()(rows())
    assert counter.get_total_flops() == 2 * 4 * 4 * HIDDEN


def test_a_profile_under_a_mode_has_the_ops_name():
    with torch.no_grad(), FlopCounterMode(display=False), torch.profiler.profile(acc_events=True) as profile:
        ir.ops.rms_norm(rows(), None, 1e-6)
    assert "irframework::rms_norm" in [event.key for event in profile.key_averages()]


# --- torch.func ------------------------------------------------------------------------------------------------------


def norm(x: Tensor, w: Tensor) -> Tensor:
    return ir.ops.rms_norm(x, w, 1e-6)


def native(x: Tensor, w: Tensor) -> Tensor:
    return ir.ops.rms_norm.native(x, w, 1e-6)


BATCHES = {
    "first": ((0, None), (3, 4, HIDDEN), (HIDDEN,)),
    "both": ((0, 0), (3, 4, HIDDEN), (3, HIDDEN)),
    "middle": ((1, None), (4, 3, HIDDEN), (HIDDEN,)),
    "last": ((-1, None), (4, HIDDEN, 3), (HIDDEN,)),
    "weight": ((None, 1), (4, HIDDEN), (HIDDEN, 3)),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("provider", ["native", "vllm_c", "nested"])
def test_vmap(batch, provider):
    dimensions, *shapes = BATCHES[batch]
    arguments = tensors(*shapes)
    with prefer(available(provider)):
        same(vmap(norm, dimensions)(*arguments), vmap(native, dimensions)(*arguments))
        same(vmap(norm, dimensions, out_dims=1)(*arguments), vmap(native, dimensions, out_dims=1)(*arguments))


def test_vmap_in_vmap():
    x, w = tensors((2, 3, 4, HIDDEN), (HIDDEN,))
    same(vmap(vmap(norm, (0, None)), (0, None))(x, w), native(x, w))


@pytest.mark.parametrize("provider", ["native", "vllm_c", "overwriting"])
def test_vmap_of_a_donating_call_writes_nowhere(provider):
    """An in-place kernel cannot write to what vmap wraps, also when calls before were plain ones."""
    x, r, w = tensors((3, 4, HIDDEN), (3, 4, HIDDEN), (HIDDEN,))
    want = ir.ops.fused_add_rms_norm.native(x, r, w, 1e-6)
    kept = [t.clone() for t in (x, r, w)]
    with torch.no_grad(), only("fused_add_rms_norm", available(provider)):
        for _ in range(3):
            ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), r.clone(), w, 1e-6)
            same(vmap(lambda x, r: ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6))(x, r), want)
    same([x, r, w], kept)


@TRACERS
def test_vmap_compiles(backend):
    x, w = tensors((3, 4, HIDDEN), (HIDDEN,))
    same(run(lambda x, w: vmap(norm, (0, None))(x, w), x, w, backend=backend), native(x, w))


def _loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w: function(x, w).sin().sum()


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(_loss(f), (0, 1)),
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](x),
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (x, w)),
    "jacrev": lambda f: jacrev(f, (0, 1)),
    "jacfwd": lambda f: jacfwd(f, (0, 1)),
    "hessian": lambda f: hessian(_loss(f)),
    "vmap_of_grad": lambda f: vmap(grad(_loss(f), 1), (0, None)),
}


@pytest.mark.parametrize("provider", ["native", "vllm_c"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_torch_func(transform, provider):
    x, w = tensors((2, 8), (8,))
    with prefer(available(provider)):
        same(TRANSFORMS[transform](norm)(x, w), TRANSFORMS[transform](native)(x, w))


@TRACERS
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap_of_grad"])
def test_derivatives_of_torch_func_compile(transform, backend):
    x, w = tensors((2, 8), (8,))
    function = torch.compile(lambda x, w: TRANSFORMS[transform](norm)(x, w), backend=backend)
    same(function(x, w), TRANSFORMS[transform](native)(x, w))


def test_functional_call_takes_other_weights():
    model, other = Model(), torch.full((HIDDEN,), 3.0)
    changed = Model()
    changed.weight.data = other.clone()
    with torch.no_grad():
        same(functional_call(model, {"weight": other}, (rows(),)), changed(rows()))
        function = torch.compile(lambda w, x: functional_call(model, {"weight": w}, (x,)), backend=lowered)
        same(function(other, rows()), changed(rows()))


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copied_model_holds_the_same_ops_and_weights_of_its_own():
    model = Model()
    other = copy.deepcopy(model)
    assert (other.norm, other.add, other.impl) == (model.norm, model.add, model.impl)
    other.weight.data *= 2
    assert not torch.equal(other(rows()), model(rows()))


def through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "through", [lambda m: pickle.loads(pickle.dumps(m)), through_torch_save], ids=["pickle", "save"]
)
def test_a_pickled_model_holds_the_same_ops(through):
    model = Model()
    other = through(model)
    assert (other.norm, other.add, other.impl) == (model.norm, model.add, model.impl)
    same(other(rows()), model(rows()))


def test_the_state_of_a_model_holds_no_op():
    assert list(Model().state_dict()) == ["weight"]


@pytest.mark.parametrize("backend", [lowered, "irframework"])
def test_a_copy_of_a_compiled_model_is_independent(backend):
    model = Model()
    compiled = torch.compile(model, backend=backend)
    want = model(rows()).detach()
    with torch.no_grad():
        same(compiled(rows()), want)
        other = copy.deepcopy(compiled)
        other._orig_mod.weight.data *= 2
        assert not torch.allclose(other(rows()), want)
        same(compiled(rows()), want)


def test_a_graph_that_holds_ops_is_pickled():
    traced = torch.fx.symbolic_trace(Model())
    other = pickle.loads(pickle.dumps(traced))
    assert ir_ops(other) == ir_ops(traced)
    same(other(rows()), traced(rows()))


def test_a_lowered_graph_is_copied():
    traced = make_fx(Model())(rows())
    with prefer("overwriting"):
        lower = ir.compiler.lower(traced, [rows()])
    same(copy.deepcopy(lower)(rows()), Model()(rows()))
