"""What the author of the platform tests. The package is installed, so torch knows the device without an import."""

import gc

import pytest
import torch
from irframework_toydev import compiler, kernels, passes
from irframework_toydev.device import memory_of

import irframework as ir
from irframework.testing import conformance_tests

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

test_conformance = conformance_tests("toy_kernels")


def there(*values):
    return tuple(value.to("toy") if isinstance(value, torch.Tensor) else value for value in values)


def near(got, want, tolerance=1e-5):
    for one, other in zip(got, want, strict=True):
        assert one.device.type == "toy"
        torch.testing.assert_close(one.detach().cpu(), other, atol=tolerance, rtol=tolerance)


# --- the device ------------------------------------------------------------------------------------------------------


def test_views_share_the_memory_of_the_device():
    x = torch.zeros(4, 6, device="toy")
    part = x[1:, ::2]
    part.add_(1)
    assert part.stride() == (6, 2)
    assert x.sum().item() == 9
    assert not x.t().is_contiguous()
    assert torch.equal(x.t().contiguous().cpu(), x.cpu().t())


def test_a_tensor_may_change_its_sizes_in_place():
    x = torch.arange(6.0).view(2, 3).to("toy")
    x.t_().unsqueeze_(0)
    assert x.shape == (1, 3, 2)
    assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3).t()[None])


def test_an_output_of_another_size_is_given_one():
    x, out = torch.ones(3, device="toy"), torch.empty(0, device="toy")
    assert torch.add(x, x, out=out) is out
    assert out.tolist() == [2, 2, 2]


def test_memory_is_freed_with_its_last_tensor():
    def alive():
        gc.collect()
        return sum(type(o) is torch.UntypedStorage and o.nbytes() == 4 * 12345 for o in gc.get_objects())

    before = alive()
    x = torch.empty(12345, device="toy")
    assert alive() == before + 1
    parameter = torch.nn.Parameter(x)
    del x
    assert memory_of(parameter).shape == (12345,)
    del parameter
    assert alive() == before


# --- the platform ----------------------------------------------------------------------------------------------------


def test_the_platform_is_current():
    assert ir.current_platform().name == "toy"
    (info,) = (plugin for plugin in ir.plugins() if plugin.name == "toydev")
    assert (info.status, info.providers) == ("loaded", ("toy_kernels",))


def test_kernels_run_where_their_device_is_and_nowhere_else():
    x = torch.randn(4, 64)
    for _ in range(3):
        assert ir.ops.rms_norm.dispatch(x, None, 1e-6).provider != "toy_kernels"
        assert ir.ops.rms_norm.dispatch(x.to("toy"), None, 1e-6).provider == "toy_kernels"
    reasons = {c.provider: c.reason for c in ir.explain("rms_norm", x, None, 1e-6).candidates}
    assert reasons["toy_kernels"] == "runs on toy, the tensors are on cpu"


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ir.errors.DeviceMismatchError, match="'weight' is on cpu, but 'x' is on toy"):
        ir.ops.rms_norm(torch.ones(2, 4, device="toy"), torch.ones(4), 1e-6)


def test_the_configuration_is_checked_by_the_platform():
    ir.configure(ir.KernelConfig(autotune=True))
    assert not ir.current_config().autotune
    ir.configure(ir.KernelConfig())


# --- eager -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ir.ops.__all__)
def test_every_standard_op_has_a_meaning_on_the_device(name):
    op = getattr(ir.ops, name)
    arguments = op.generate_inputs(shape=(4, 64))
    want = op.native(*arguments)
    with ir.priority({name: "native"}):
        got = op(*there(*arguments))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for one, other in pairs:
        assert one.device.type == "toy"
        torch.testing.assert_close(one.cpu().float(), other.float())


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_eager_call_is_one_launch(name, dtype):
    op = getattr(ir.ops, name)
    arguments = op.generate_inputs(shape=(4, 64), dtype=dtype)
    before = sum(kernels.LAUNCHES.values())
    got, want = op(*there(*arguments)), op.native(*arguments)
    assert sum(kernels.LAUNCHES.values()) == before + 1
    one, other = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    near(one, other, op.get_tolerance(dtype).rtol)


def test_donated_memory_is_used_and_other_memory_is_not():
    x, r, w = torch.randn(4, 64), torch.randn(4, 64), torch.rand(64)
    a, b, weight = there(x, r, w)
    near(ir.ops.fused_add_rms_norm(a, b, weight, 1e-6), ir.ops.fused_add_rms_norm.native(x, r, w, 1e-6))
    near((a, b), (x, r), 0)
    y, total = ir.ops.fused_add_rms_norm.maybe_inplace(a, b, weight, 1e-6)
    assert y is a
    assert total is b


# --- compiled --------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(64, 32)
        self.weight = torch.nn.Parameter(torch.rand(32))

    def forward(self, x, residual):
        x, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1.0, residual + 0, self.weight, 1e-6)
        x = self.down(ir.ops.silu_and_mul(self.up(x)))
        return ir.ops.rms_norm(x + residual, self.weight, 1e-6), residual


@pytest.fixture
def models():
    torch._dynamo.reset()
    torch.manual_seed(0)
    here, away = Model(), Model()
    away.load_state_dict(here.state_dict())
    compiler.programs.clear()
    return here, away.to("toy")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "irframework"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_agrees_with_eager_code(models, backend, dynamic):
    here, away = models
    call = torch.compile(away, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for rows in (4, 7):
            x, r = torch.randn(rows, 32), torch.randn(rows, 32)
            given = there(x, r)
            near(call(*given), here(x, r))
            near(given, (x, r), 0)


@pytest.mark.parametrize("backend", [None, "aot_eager", "irframework"])
def test_a_model_can_be_trained(models, backend):
    here, away = models
    x, r = torch.randn(4, 32), torch.randn(4, 32)
    call = away if backend is None else torch.compile(away, backend=backend)
    call(*there(x, r))[0].square().sum().backward()
    here(x, r)[0].square().sum().backward()
    near([p.grad for p in away.parameters()], [p.grad for p in here.parameters()], 1e-4)


def test_the_platforms_compiler_gets_launches_of_kernels(models):
    _, away = models
    dropped = passes.DropUnitFactors.dropped
    with torch.no_grad():
        torch.compile(away, backend="irframework")(*there(torch.randn(4, 32), torch.randn(4, 32)))
    (program,) = compiler.programs
    assert program.listing.count("toydev.fused_add_rms_norm_.default") == 2  # the sum before the last norm is fused
    assert ir.last_report().fusions == {"fused_add_rms_norm": 1}
    assert not [target for target in program.listing if "irframework" in target or "silu_and_mul" in target]
    assert passes.DropUnitFactors.dropped == dropped + 1
    assert {op: set(nodes.values()) for op, nodes in ir.last_report().selected_impls.items()} == {
        "fused_add_rms_norm": {"toy_kernels"},
        "silu_and_mul": {"native"},  # so say the platform's priorities for compiled code
    }


def test_inductor_itself_has_no_code_for_the_device():
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"Device toy not supported|func != nullptr"):
        torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(2, device="toy"))
