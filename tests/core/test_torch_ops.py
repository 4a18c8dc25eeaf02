"""The torch operators behind the ops."""

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework.torch_ops import define_donate


def test_operators_are_plain_library_ops_on_every_device(declare):
    op = declare(allow_inplace=True)
    for overload in ("", ".maybe_inplace"):
        table = torch._C._dispatch_dump(f"irframework::{op.name}{overload}")
        assert "CompositeExplicitAutograd" in table
        for key in ("CPU", "CUDA", "PrivateUse1"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"irframework::{op.name}{overload}", key)


def test_no_wrapper_of_custom_op_is_in_between(declare):
    from torch._library.custom_ops import OPDEFS

    assert f"irframework::{declare().name}" not in OPDEFS


def test_both_overloads_are_functional(declare):
    op = declare(allow_inplace=True)
    for target in (op.torch_op, op.maybe_inplace.torch_op):
        assert not target._schema.is_mutable
        assert all(argument.alias_info is None for argument in (*target._schema.arguments, *target._schema.returns))
        assert torch.Tag.pt2_compliant_tag in target.tags


def test_arguments_may_be_given_by_name_and_left_out(declare):
    op = declare(allow_inplace=True)
    x, w = torch.ones(2), torch.ones(2)
    for call in (op.torch_op, op.maybe_inplace.torch_op):
        assert torch.equal(call(x, w), call(weight=w, x=x))
        assert torch.equal(call(x), op.native(x))


def test_torch_op_obeys_priorities(declare):
    op = declare()
    op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x * 10)
    assert op.torch_op(torch.ones(1)).item() == 10
    with ir.priority({op.name: "native"}):
        assert op.torch_op(torch.ones(1)).item() == 2


def test_torch_op_never_overwrites_a_tensor_that_is_used_twice(declare):
    def native(x: Tensor, x_residual: Tensor) -> tuple[Tensor, Tensor]:
        return x + x_residual, x - x_residual

    op = declare(native, allow_inplace=True)

    @op.register_impl("inp", inplace=True)
    def inp(x, x_residual):
        difference = x - x_residual
        x.add_(x_residual)
        x_residual.copy_(difference)
        return x, x_residual

    with ir.priority({op.name: "inp"}):
        a = torch.ones(2)
        total, difference = op.maybe_inplace.torch_op(a, a)
        assert (total.tolist(), difference.tolist()) == ([2, 2], [0, 0])
        total, difference = op.torch_op(torch.ones(2), torch.ones(2))
        assert (total.tolist(), difference.tolist()) == ([2, 2], [0, 0])


def test_donate_is_a_copy_with_the_identitys_gradient():
    donate = define_donate()
    x = torch.arange(4.0, requires_grad=True)
    y = donate(x)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1]
    assert define_donate() is donate


@pytest.mark.parametrize("test", ["test_schema", "test_faketensor", "test_aot_dispatch_static"])
def test_torch_checks_of_donate_pass(test):
    torch.library.opcheck(define_donate(), (torch.ones(3, requires_grad=True),), test_utils=test)


def test_wrong_types_are_refused_by_torch_too(declare):
    with pytest.raises(RuntimeError, match="epsilon"):
        declare().torch_op(torch.ones(1), None, "a")


def test_fake_outputs_do_not_depend_on_the_provider(declare):
    op = declare()
    op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x.new_empty(99, dtype=torch.int8))
    y = op.torch_op(torch.ones(2, device="meta"))
    assert (y.shape, y.dtype) == ((2,), torch.float32)
