"""Device families."""

import pytest
import torch

import irframework as ir
from irframework import errors
from irframework.platform import BUILT_IN, add_platform, current_platform, platform_for, platforms
from irframework.registry import Transaction, registry


class Acme(ir.Platform):
    name = "acme"
    device_types = ("acme", "acme_old")

    def is_available(self):
        return True


@pytest.fixture
def added():
    transaction = Transaction("test")

    def add(*given):
        with registry.registering(transaction):
            for platform in given:
                add_platform("test", platform)

    yield add
    transaction.roll_back()


def test_this_machine_has_a_platform():
    assert current_platform().is_available()
    assert current_platform() is ir.current_platform()


def test_torchs_own_platforms_come_last_and_cpu_is_always_there(added):
    added(Acme())
    names = [platform.name for platform in platforms()]
    assert names[-4:] == [platform.name for platform in BUILT_IN] == ["cuda", "rocm", "xpu", "cpu"]
    assert names.index("acme") < names.index("cuda")


def test_available_platform_of_a_plugin_is_current_until_it_is_taken_back(added):
    acme = Acme()
    added(acme)
    assert current_platform() is acme
    assert platform_for("acme_old") is acme
    assert platform_for("cpu").name == "cpu"


def test_defaults_of_a_device_come_from_its_own_platform(declare, added):
    """The platform is an accelerator, the tensor is on the CPU: the accelerator's kernel must not run."""
    op = declare()
    for name, value, devices in (("on_acme", 5.0, ("acme",)), ("on_cpu", 6.0, ("cpu",)), ("anywhere", 7.0, None)):
        op.register_impl(name, device_types=devices)(three_parameters(value))
    acme = Acme()
    acme.get_default_ir_op_priority = lambda mode="eager": {op.name: ["on_acme", "anywhere"]}
    added(acme)
    for _ in range(3):
        assert op(torch.ones(1)).item() == 7
    assert op.get_priority() == ["on_acme", "anywhere", "on_cpu", "native"]


def three_parameters(value):
    def fn(x, weight=None, epsilon=1e-6):
        return torch.full_like(x, value)

    return fn


@pytest.mark.parametrize("wrong", [object(), Acme, ir.Platform(), None, "acme"])
def test_only_platforms_with_a_name_and_devices_are_taken(added, wrong):
    with pytest.raises(errors.PlatformError, match=r"plugin 'test'.*ir\.Platform"):
        added(wrong)


@pytest.mark.parametrize("name", ["cpu", "cuda", "acme"])
def test_name_of_a_platform_is_taken_once(added, name):
    added(Acme())
    twin = Acme()
    twin.name = name
    with pytest.raises(errors.PlatformError, match=f"'{name}', which"):
        added(twin)


def test_asking_for_the_platform_initialises_no_device():
    assert not torch.cuda.is_initialized()
