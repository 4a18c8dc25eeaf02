"""The table of ops, and registrations that are taken back."""

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors
from irframework.registry import Transaction, registry


def declared_and_rolled_back(name, native, **options):
    transaction = Transaction("test")
    with registry.registering(transaction):
        op = ir.register_op(name=name, **options)(native)
    assert op(torch.ones(1)).item() == op.torch_op(torch.ones(1)).item() == 2
    assert op.plugin == "test"
    transaction.roll_back()
    with pytest.raises(errors.UnknownOpError):
        getattr(ir.ops, name)
    return op


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def times_three(x: Tensor) -> Tensor:
    return x * 3


def with_factor(x: Tensor, factor: float = 3.0) -> Tensor:
    return x * factor


@pytest.mark.parametrize("second", [times_three, with_factor])
def test_rolled_back_op_is_gone_and_can_be_declared_anew(second):
    name = f"test_rolled_back_{second.__name__}"
    declared_and_rolled_back(name, plus_one)
    assert not hasattr(torch.ops.irframework, name)
    again = ir.register_op(name=name)(second)
    x = torch.ones(1, requires_grad=True)
    for call in (again, again.torch_op):
        assert call(x).item() == 3
        assert torch.autograd.grad(call(x), x)[0].item() == 3
    assert again.torch_op(torch.ones(2, device="meta")).shape == (2,)


def test_rolled_back_op_with_two_overloads_can_be_declared_anew():
    """torch crashes when such an op is removed and looked up again, so its operators are used again."""
    declared_and_rolled_back("test_rolled_back_inplace", plus_one, allow_inplace=True)
    again = ir.register_op(name="test_rolled_back_inplace", allow_inplace=True)(times_three)
    x = torch.ones(1, requires_grad=True)
    for call in (again, again.torch_op, again.maybe_inplace, again.maybe_inplace.torch_op):
        assert call(x.detach()).item() == 3
        assert torch.autograd.grad(call(x), x)[0].item() == 3
        assert call(torch.ones(2, device="meta")).shape == (2,)


def test_rolled_back_op_with_two_overloads_cannot_change_its_signature():
    declared_and_rolled_back("test_rolled_back_otherwise", plus_one, allow_inplace=True)
    with pytest.raises(errors.DuplicateOpError, match="torch cannot forget"):
        ir.register_op(name="test_rolled_back_otherwise", allow_inplace=True)(with_factor)
    with pytest.raises(errors.DuplicateOpError, match="torch cannot forget"):
        ir.register_op(name="test_rolled_back_otherwise")(plus_one)


def test_rolled_back_implementation_is_gone(declare):
    op = declare()
    transaction = Transaction("test")
    with registry.registering(transaction):
        op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x * 10)
    assert op(torch.ones(1)).item() == op(torch.ones(1)).item() == 10
    assert op.impls["p"].plugin == "test"
    assert transaction.providers == {"p"}
    transaction.roll_back()
    assert op(torch.ones(1)).item() == 2
    assert set(op.impls) == {"native"}


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_transaction_that_raises_takes_everything_back(declare, raised):
    op = declare()

    def half():
        op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x * 10)
        raise raised

    with pytest.raises(raised), registry.registering(Transaction("test")):
        half()
    assert set(op.impls) == {"native"}
    assert registry.transaction is None


def test_registration_of_another_thread_is_not_attributed_to_a_loading_plugin(declare):
    import threading

    op, transaction = declare(), Transaction("test")
    ready = threading.Event()

    def elsewhere():
        ready.set()
        op.register_impl("mine")(lambda x, weight=None, epsilon=1e-6: x)

    with registry.registering(transaction):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        ready.wait(10)
    thread.join()
    assert op.impls["mine"].plugin is None
    assert transaction.providers == set()


def test_there_is_one_registry():
    import irframework.op
    import irframework.ops

    assert ir.ops.rms_norm is registry.ops["rms_norm"] is irframework.ops.rms_norm


def test_module_with_ops_and_implementations_can_be_reloaded(tmp_path, monkeypatch):
    import importlib

    def write(factor, arguments="x: Tensor"):
        (tmp_path / "reloaded_ops.py").write_text(
            "import irframework as ir\nfrom torch import Tensor\n\n"
            f"@ir.register_op\ndef reloaded_op({arguments}) -> Tensor:\n    return x * {factor}\n\n"
            f"@reloaded_op.register_impl('p')\ndef reloaded_impl(x):\n    return x * {factor * 10}\n"
        )

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    write(2)
    module = importlib.import_module("reloaded_ops")
    held, x = module.reloaded_op, torch.ones(1)
    with ir.priority(reloaded_op="native"):
        assert held(x).item() == held.torch_op(x).item() == 2
    write(3)
    importlib.reload(module)
    assert module.reloaded_op is held
    for call in (held, held.torch_op):
        assert call(x).item() == 30
        with ir.priority(reloaded_op="native"):
            assert call(x).item() == 3
    y = torch.ones(1, requires_grad=True)
    assert torch.autograd.grad(held(y), y)[0].item() == 3
    write(4, arguments="x: Tensor, more: float = 1.0")
    with pytest.raises(errors.DuplicateOpError, match="Restart Python"):
        importlib.reload(module)
    assert held(x).item() == 30
