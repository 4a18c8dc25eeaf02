"""Training: the standard ops' gradients through every provider, eager and through every way to compile."""

import itertools
import re

import pytest
import torch
from compiler_support import lowered, report
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from training_cases import (
    CASES,
    FAKES,
    OPS,
    PROVIDERS,
    QUANTISING,
    backends,
    compiled,
    differentiable,
    exact,
    fake_providers,
    gradients,
    installed,
    loss,
    near,
    need,
    prefer,
    present,
    ran_by,
)

import irframework as ir

WITHOUT_INDUCTOR = ("eager", "aot_eager", "aot_eager_decomp_partition", lowered)
INDUCTOR = ("irframework", "inductor")


@pytest.fixture(autouse=True, scope="module")
def _providers():
    with fake_providers():
        yield


# --- every op, every provider ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_eager_gradients_are_those_of_native(case, provider):
    need(provider)
    if not ran_by(case, provider):
        pytest.skip("the provider does not take this call")
    with prefer(provider):
        near(gradients(case.op, case.arguments()), exact(case))


def test_no_case_is_skipped_for_every_provider():
    """What the test above skips is only what a provider says that it does not do."""
    found = {name: [p for p in PROVIDERS if installed(p) and ran_by(case, p)] for name, case in CASES.items()}
    assert all({"native", "t_writing"} <= set(providers) for providers in found.values())
    assert "t_overwriting" in found["fused_add_rms_norm"]
    assert "t_nested" in found["rotary_embedding"]
    if installed("vllm_c"):
        taken = {name.partition("-")[0] for name, providers in found.items() if "vllm_c" in providers}
        assert taken == {*OPS} - {*QUANTISING}


IN_A_GRAPH = [
    CASES[name]
    for name in ("rms_norm-part", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul-tanh", "rotary_embedding")
]


def everything(*arguments):
    """Several cases in one graph: to compile each alone would take minutes."""
    rest = list(arguments)
    outputs = []
    for case in IN_A_GRAPH:
        count = len(case.make())
        outputs += present(case.op(*rest[:count]))
        rest = rest[count:]
    return tuple(outputs)


def check_everything(backend, *providers):
    arguments = [argument for case in IN_A_GRAPH for argument in case.arguments()]
    want = [gradient for case in IN_A_GRAPH for gradient in exact(case)]
    with prefer(*providers):
        near(gradients(compiled(everything, backend, fullgraph=True), arguments), want)


@pytest.mark.parametrize("providers", [("native",), ("vllm_c",), FAKES], ids=["native", "vllm_c", "fakes"])
@backends(*WITHOUT_INDUCTOR, *INDUCTOR)
def test_gradients_in_a_graph_are_those_of_native(backend, providers):
    need(providers[0])
    if backend in INDUCTOR and providers == ("native",):
        pytest.skip("Inductor's own code is not the point")
    check_everything(backend, *providers)
    if backend not in ("eager", "aot_eager", "aot_eager_decomp_partition"):  # those lower nothing
        assert {p for nodes in report().selected_impls.values() for p in nodes.values()} >= {*providers}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_native_leaves_no_call_of_an_op_in_the_code_of_stock_inductor(training):
    """Plain `torch.compile` sees native's torch ops, and fuses them with what stands around them into one kernel."""
    x, w = CASES["rms_norm"].arguments()[:2]
    given = [x.requires_grad_(training), w]
    want = gradients(lambda x, w: ir.ops.rms_norm.native(x, w, 1e-3) * 2 + 1, [x.double(), w.double()], [0])
    with prefer("native"), torch._inductor.config.patch(fx_graph_cache=False):
        f = torch.compile(lambda x, w: ir.ops.rms_norm(x, w, 1e-3) * 2 + 1)
        y, codes = run_and_get_code(lambda: f(*given))
        if training:
            (got,), more = run_and_get_code(lambda: torch.autograd.grad(loss(y), [x]))
            codes += more
            near([got], want)
    assert len(codes) == 1 + training
    assert "torch.ops.irframework" not in "".join(codes)
    assert len(set(re.findall(r"cpp_fused_\w+", codes[0]))) == 1


# --- ops that quantise: the gradient of codes is float8, as torch has it ---------------------------------------------


def with_readers(op):
    """Outputs in float32, each times numbers that float8 holds, so that no gradient of codes is rounded."""

    def f(*arguments):
        outputs = op(*arguments)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return sum((o.float() * (1 + torch.arange(o.numel()).view(o.shape) % 3)).sum() for o in outputs)

    return f


def gradients_of_a_sum(call, arguments):
    given = [a.detach().clone().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
    return torch.autograd.grad(call(*given), [a for a in given if isinstance(a, Tensor)])


@pytest.mark.parametrize("provider", ["native", "vllm_c", "t_writing"])
@pytest.mark.parametrize("case", QUANTISING.values(), ids=QUANTISING)
@backends(None, lowered)
def test_gradients_of_what_is_quantised_are_those_of_native(backend, case, provider):
    need(provider)
    arguments = case.arguments()
    with prefer(provider):
        got = gradients_of_a_sum(compiled(with_readers(case.op), backend), arguments)
    want = gradients_of_a_sum(with_readers(case.op.native), arguments)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-5 * w.abs().max().item())


def quantised_layer(x, residual, weight, scale):
    """Two layers' worth of quantisation, each output read."""
    q, total = ir.ops.fused_add_rms_norm_static_quant_fp8(x, residual, weight, scale, 1e-3)
    codes, scales = ir.ops.silu_and_mul_dynamic_quant_fp8(q.float() * scale)
    return torch.cat((codes.float() * scales, total), -1)


@backends(None, "aot_eager", *INDUCTOR)
def test_a_graph_that_quantises_can_be_trained(backend):
    torch.manual_seed(0)
    arguments = torch.randn(4, 8), torch.randn(4, 8), torch.rand(8), torch.full((1,), 0.02)

    def summed(call):
        return lambda *given: call(*given).pow(2).sum()

    got = gradients_of_a_sum(compiled(summed(quantised_layer), backend, fullgraph=True), arguments)
    with prefer("native"):
        want = gradients_of_a_sum(summed(quantised_layer), arguments)
    for g, w in zip(got, want, strict=True):  # Inductor leaves out roundings to float8 in between
        torch.testing.assert_close(g, w, rtol=0, atol=2.0**-3 * w.abs().max().item())


# --- which inputs need a gradient ------------------------------------------------------------------------------------


def subsets(case):
    places = differentiable(case.make())
    return [s for count in range(1, len(places) + 1) for s in itertools.combinations(places, count)]


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "rotary_embedding"])
@backends(None, "aot_eager", lowered)
def test_any_part_of_the_inputs_may_need_gradients(backend, name):
    case = CASES[name]
    with prefer("t_overwriting", "t_writing"):
        for wanted in subsets(case):
            torch._dynamo.reset()
            near(gradients(compiled(case.op, backend), case.arguments(), wanted), exact(case, wanted))


@backends(None, "aot_eager", lowered)
def test_one_tensor_as_two_arguments_gets_both_gradients(backend):
    def twice(op):
        return lambda x, w: op(x, x, w, 1e-3)

    x, w = CASES["rms_norm"].arguments()[:2]
    want = gradients(twice(ir.ops.fused_add_rms_norm.native), [x.double(), w.double()])
    with prefer("t_overwriting"):
        near(gradients(compiled(twice(ir.ops.fused_add_rms_norm), backend), [x, w]), want)


@backends(None, "aot_eager", lowered)
def test_a_result_used_twice_gets_both_gradients(backend):
    def network(norm, add):
        def f(x, r, w):
            y, s = add(x, r, w, 1e-3)
            z, t = add(y, s, w, 1e-3)
            return y * norm(y, w, 1e-3) + z, s * t

        return f

    arguments = CASES["fused_add_rms_norm"].arguments()[:3]
    native = network(ir.ops.rms_norm.native, ir.ops.fused_add_rms_norm.native)
    want = gradients(native, [a.double() for a in arguments])
    with prefer("t_overwriting", "t_writing"):
        near(gradients(compiled(network(ir.ops.rms_norm, ir.ops.fused_add_rms_norm), backend), arguments), want)


# --- second derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["native", "t_writing", "t_nested"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_first_and_second_derivatives_agree_with_finite_differences(case, provider):
    if not ran_by(case, provider):
        pytest.skip("the provider does not take this call")
    arguments = case.arguments(torch.float64)
    for place in differentiable(arguments):
        arguments[place].requires_grad_()

    def call(*given):
        return present(case.op(*given))

    with prefer(provider):
        assert torch.autograd.gradcheck(call, arguments)
        assert torch.autograd.gradgradcheck(call, arguments)


def second_derivatives(call, arguments):
    given = [a.detach().clone().requires_grad_() for a in arguments]
    first = torch.autograd.grad(loss(call(*given)), given, create_graph=True)
    return list(torch.autograd.grad(loss(first), given))


def test_second_derivatives_through_a_graph_that_dynamo_runs_as_it_is():
    x, w = CASES["rms_norm"].arguments(torch.float64)[:2]
    call = torch.compile(lambda x, w: ir.ops.rms_norm(x, w, 1e-3), backend="eager")
    with prefer("t_writing"):
        near(
            second_derivatives(call, [x, w]),
            second_derivatives(lambda x, w: ir.ops.rms_norm.native(x, w, 1e-3), [x, w]),
        )


@backends("aot_eager", "irframework")
def test_torch_refuses_second_derivatives_of_compiled_graphs(backend):
    """AOTAutograd's own limit; the same without IR ops. They fail, they are not wrong."""
    x, w = CASES["rms_norm"].arguments(torch.float64)[:2]
    for norm in (ir.ops.rms_norm, ir.ops.rms_norm.native):
        torch._dynamo.reset()
        call = torch.compile(lambda x, w, norm=norm: norm(x, w, 1e-3), backend=backend)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            second_derivatives(call, [x, w])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, for forward mode
@backends(None, *WITHOUT_INDUCTOR)
def test_functional_derivatives_inside_a_compiled_function(backend):
    """`torch.func` and forward mode see native's torch ops: a kernel would hide the derivative from them."""
    x, w = CASES["rms_norm"].arguments(torch.float64)[:2]

    def derivatives(norm):
        def f(x, w):
            def of(t):
                return norm(t, w, 1e-3)

            first = torch.func.grad(lambda t: of(t).pow(2).sum())
            return first(x), torch.func.grad(lambda t: first(t).pow(2).sum())(x), torch.func.jvp(of, (x,), (2 * x,))[1]

        return f

    with prefer("t_writing"):
        near(compiled(derivatives(ir.ops.rms_norm), backend)(x, w), derivatives(ir.ops.rms_norm.native)(x, w))
