"""A device that torch does not know by name: device matching is by its type, and native needs nothing of it."""

import pytest

import irframework as ir

from .distributions import RMS_NORM, answer, run_python, write_distribution
from .fake_device import SETUP

pytestmark = pytest.mark.fakedev

PLATFORM = (
    """
class Toy(ir.Platform):
    name = "toy_platform"
    device_types = ("toy",)
    def is_available(self):
        return True
    def get_default_ir_op_priority(self, mode="eager"):
        return {"rms_norm": ["toy_kernels"]}

@ir.hookimpl
def irframework_platforms():
    return [Toy()]
"""
    + RMS_NORM.format(provider="cpu_only", value=1).replace('"cpu_only"', '"cpu_only", device_types=("cpu",)')
    + """
    @ir.ops.rms_norm.register_impl("toy_kernels", device_types=("toy",))
    def on_toy(x, weight, epsilon, variance_size=None):
        return x * 0 + 7
    @ir.ops.fused_add_rms_norm.register_impl("toy_kernels", device_types=("toy",), inplace=True)
    def fused(x, x_residual, weight, epsilon, variance_size=None):
        x_residual.add_(x)
        x.fill_(7)
        return x, x_residual
"""
)

ALL_OPS = """
import irframework as ir

def same(op, got, expected):
    if got is None or expected is None:
        return got is expected
    near = op.get_tolerance(expected.dtype)  # the CPU has kernels for some functions that other devices write out
    return got.device.type == "toy" and torch.allclose(got.cpu().float(), expected.float(), near.rtol, near.atol)

torch.manual_seed(0)
found = {}
for name in ir.ops.__all__:
    op = getattr(ir.ops, name)
    args = op.generate_inputs(shape=(4, 64))
    there = [a.to("toy") if isinstance(a, torch.Tensor) else a for a in args]
    assert all(t.device.type == "toy" for t in there if isinstance(t, torch.Tensor))
    expected = op.native(*args)
    ok = []
    with ir.priority({name: "native"}):
        forms = [op, op.torch_op] + ([op.maybe_inplace, op.maybe_inplace.torch_op] if op.allow_inplace else [])
        for call in forms:
            for _ in range(2):
                got = call(*there)
                pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
                ok.append(all(same(op, g, e) for g, e in pairs))
    found[name] = all(ok)
"""


def test_every_op_runs_natively_on_a_renamed_device():
    found = answer(run_python(SETUP + ALL_OPS + "print(json.dumps(found))"))
    assert found == dict.fromkeys(ir.ops.__all__, True)


def test_platform_of_a_renamed_device_gets_its_own_providers_and_never_another_devices(tmp_path):
    write_distribution(tmp_path, "toy", PLATFORM)
    program = (
        SETUP
        + """
import irframework as ir
x = torch.ones(2, 4)
a = x.to("toy")
seen = []
for _ in range(3):
    seen.append([ir.ops.rms_norm.dispatch(t, None, 1e-6).provider for t in (a, x)]
                + [float(ir.ops.rms_norm(t, None, 1e-6).cpu()[0, 0]) for t in (a, x)])
reasons = {c.provider: c.reason for c in ir.ops.rms_norm.explain(a, None, 1e-6).candidates}
try:
    ir.ops.rms_norm(a, torch.ones(4), 1e-6)
    mixed = None
except ir.errors.DeviceMismatchError as error:
    mixed = str(error)
r = (x * 2).to("toy")
y, s = ir.ops.fused_add_rms_norm.maybe_inplace(a, r, None, 1e-6)
print(json.dumps([ir.current_platform().name, seen, reasons["cpu_only"], mixed, y is a, s is r, s.cpu().tolist()[0]]))
"""
    )
    name, seen, reason, mixed, y_given, s_given, total = answer(run_python(program, tmp_path))
    assert name == "toy_platform"
    assert seen == [["toy_kernels", "cpu_only", 7.0, 1.0]] * 3
    assert reason == "runs on cpu, the tensors are on toy"
    assert "'weight' is on cpu, but 'x' is on toy" in mixed
    assert y_given
    assert s_given
    assert total == [3, 3, 3, 3]
