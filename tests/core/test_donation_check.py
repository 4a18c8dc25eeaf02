"""`IRFRAMEWORK_CHECK_DONATION=1`: a use after donation is found where it is made."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import irframework as ir
from irframework import donation
from irframework.errors import DonationError
from irframework.registry import registry
from irframework.settings import settings


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("IRFRAMEWORK_CHECK_DONATION", "1")
    settings.cache_clear()
    registry.changed()
    yield
    donation.forget()
    monkeypatch.undo()
    settings.cache_clear()
    registry.changed()


def both(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    residual = x + x_residual
    return (residual * 2 if weight is None else residual * weight), residual


pytestmark = pytest.mark.usefixtures("check")

Declare = Callable[..., ir.IrOp]


@pytest.fixture
def op(declare: Declare) -> ir.IrOp:
    """An op of two activations and a weight, with its own function only."""
    return declare(both, allow_inplace=True)


@pytest.fixture
def inplace(op: ir.IrOp) -> ir.IrOp:
    """The same with an in-place implementation, which is chosen."""

    @op.register_impl("inp", inplace=True)
    def inp(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x_residual.add_(x)
        torch.mul(x_residual, 2 if weight is None else weight, out=x)
        return x, x_residual

    return op


def ones(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 8))


def poisoned(tensor: Tensor) -> bool:
    """Whether a tensor holds nothing but NaN; looked at without a torch op on it."""
    return all(value != value for value in torch.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=tensor.dtype))


def test_a_use_names_tensor_op_argument_and_both_lines(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())  # the donation
    with pytest.raises(DonationError) as caught:
        x.sum()  # the use
    first, donated_at, used_at = str(caught.value).splitlines()
    assert first.startswith(
        f"A tensor float32[4, 8] was donated to op {op.name!r} as argument 'x' by maybe_inplace, and is used by "
        "'sum' afterwards."
    )
    assert donated_at.endswith("op.maybe_inplace(x, ones())  # the donation")
    assert used_at.endswith("x.sum()  # the use")
    assert donated_at.startswith(f"  donated at: {__file__}:")
    assert used_at.startswith(f"  used at:    {__file__}:")


def test_the_words_are_those_of_the_compiler(op: ir.IrOp) -> None:
    def used_later(x: Tensor, r: Tensor) -> Tensor:
        y, _ = op.maybe_inplace(x, r)
        return y + x

    messages = []
    for call in (used_later, torch.compile(used_later, backend="irframework", fullgraph=True)):
        with pytest.raises(Exception) as caught:
            call(ones(), ones())
        error = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(error, DonationError)
        messages.append(str(error).partition(" was donated ")[2].replace(" (node add)", "").splitlines())
    assert messages[0] == messages[1]


def test_every_alias_is_reported(op: ir.IrOp) -> None:
    x = ones()
    aliases = [x[1], x.t(), x.detach(), x.data, x.view(torch.int32), x.unbind()[2], x.as_strided((2,), (3,))]
    op.maybe_inplace(x, ones())
    for alias in [*aliases, x[0], x.flatten()]:
        with pytest.raises(DonationError, match=r"shares its memory|used by 'neg'"):
            torch.neg(alias)


def test_a_donated_view_is_reported_through_its_base(op: ir.IrOp) -> None:
    base = ones(3, 4, 8)
    op.maybe_inplace(base[1], ones())
    with pytest.raises(DonationError, match=r"through a tensor float32\[3, 4, 8\], which shares its memory"):
        base.sum()


def test_disjoint_parts_stay_usable(op: ir.IrOp) -> None:
    base = ones(4, 16)
    op.maybe_inplace(base[:, :8], ones())
    assert base[:, 8:].sum() == 32
    with pytest.raises(DonationError):
        base[:, 7:].sum()


def test_writing_is_a_use(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    with pytest.raises(DonationError, match="used by 'copy_'"):
        x.copy_(ones())
    with pytest.raises(DonationError, match="used by 'add'"):
        torch.add(ones(), 1, out=x)


def test_another_op_is_a_use(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    with pytest.raises(DonationError, match=f"used by '{op.name}'"):
        op(ones(), x)
    with pytest.raises(DonationError, match=f"used by '{op.name}'"):
        op.maybe_inplace(ones(), x_residual=x)


def test_what_is_returned_beside_the_result_is_found_when_it_is_used(op: ir.IrOp) -> None:
    def returns_it(x: Tensor) -> tuple[Tensor, Tensor]:
        return op.maybe_inplace(x, ones())[0], x

    _, x = returns_it(ones())
    with pytest.raises(DonationError, match="returns_it: return op"):
        x + 1


def test_a_list_of_tensors_is_looked_through(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    with pytest.raises(DonationError, match="used by 'cat'"):
        torch.cat([ones(), x])


def test_shape_dtype_and_views_may_be_asked(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    assert (x.shape, x.dtype, x.stride(), x.is_contiguous(), x[1:].numel()) == ((4, 8), torch.float32, (8, 1), True, 24)
    assert torch.zeros_like(x).sum() == 0
    assert x.new_ones(3).sum() == 3


def test_keyword_arguments_are_donated(op: ir.IrOp) -> None:
    x, r = ones(), ones()
    op.maybe_inplace(x_residual=r, x=x)
    with pytest.raises(DonationError, match="argument 'x_residual'"):
        r + 1


def test_arguments_that_are_no_activations_stay_usable(op: ir.IrOp) -> None:
    weight = ones(8)
    op.maybe_inplace(ones(), ones(), weight)
    assert weight.sum() == 8


def test_the_functional_form_takes_nothing_away(op: ir.IrOp, inplace: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(ones(), ones())
    inplace(x, ones())
    assert x.sum() == 32


def test_one_tensor_donated_twice(inplace: ir.IrOp) -> None:
    x = ones()
    y, r = inplace.maybe_inplace(x, x)
    assert (y.sum(), r.sum()) == (128, 64)
    with pytest.raises(DonationError):
        x + 1


def test_a_tensor_and_its_view_donated(inplace: ir.IrOp) -> None:
    x = ones(2, 4, 8)
    y, r = inplace.maybe_inplace(x[0], x[0].view(4, 8))
    assert (y.sum(), r.sum()) == (128, 64)
    assert x[1].sum() == 32
    with pytest.raises(DonationError):
        x[0].sum()


def test_rows_that_are_one_in_memory(op: ir.IrOp) -> None:
    x = torch.ones(8)
    y, _ = op.maybe_inplace(x.expand(4, 8), ones())
    assert y.sum() == 128
    assert poisoned(x)


def test_no_rows(op: ir.IrOp) -> None:
    x = ones(0, 8)
    op.maybe_inplace(x, ones(0, 8))
    assert x.sum() == 0


def test_memory_that_is_given_to_another_tensor_is_usable(op: ir.IrOp) -> None:
    places = set()
    for _ in range(200):
        x = torch.ones(64, 64)
        assert x.sum() == 4096
        places.add(x.data_ptr())
        op.maybe_inplace(x, torch.ones(64, 64))
        del x
    assert len(places) < 200  # else this shows nothing


def test_donations_of_freed_tensors_are_forgotten(op: ir.IrOp) -> None:
    for _ in range(50):
        op.maybe_inplace(ones(), ones())
    assert len(donation._remembered.storages) < 10


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int32, 2**31 - 1), (torch.uint8, 255), (torch.int64, 2**63 - 1), (torch.bool, True)],
)
def test_poison(declare: Declare, dtype: torch.dtype, value: Any) -> None:
    def native(x: Tensor) -> Tensor:
        return x.float()

    x = torch.zeros(3, dtype=dtype)
    array = x.numpy()
    declare(native, allow_inplace=True).maybe_inplace(x)
    assert array.tolist() == [value] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_floating_point_is_filled_with_nan(declare: Declare, dtype: torch.dtype) -> None:
    def native(x: Tensor) -> Tensor:
        return torch.zeros(2)

    x = torch.zeros(3, dtype=dtype)
    declare(native, allow_inplace=True).maybe_inplace(x)
    donation.forget()
    assert x.to(torch.complex64).isnan().all()


def test_only_the_donated_part_is_filled(op: ir.IrOp) -> None:
    base = ones(4, 16)
    op.maybe_inplace(base[:, ::2], ones())
    donation.forget()
    assert base[:, ::2].isnan().all()
    assert (base[:, 1::2] == 1).all()


def test_a_reader_that_is_no_torch_op_sees_no_result(inplace: ir.IrOp) -> None:
    x, r = ones(), ones()
    array = x.numpy()
    y, _ = inplace.maybe_inplace(x, r)
    assert y.sum() == 128
    assert (array != array).all()


def test_a_result_in_donated_memory_is_usable(inplace: ir.IrOp) -> None:
    y, r = inplace.maybe_inplace(ones(), ones())
    for alias in (y, y[0], y.data, torch.nn.Parameter(y), y.detach().view(torch.int32)):
        alias.sum()
    y.add_(r)
    assert y.sum() == 192


def test_the_implementation_works_in_place(inplace: ir.IrOp, op: ir.IrOp) -> None:
    seen = []
    inner = inplace.impls["inp"].fn

    def watched(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen.append(x.data_ptr())
        return inner(x, x_residual, weight)

    inplace.register_impl("watched", inplace=True)(watched)
    with ir.priority({inplace.name: "watched"}):
        for _ in range(3):
            x = ones()
            inplace.maybe_inplace(x, ones())
            assert seen[-1] == x.data_ptr()


def test_a_chain_of_donations(inplace: ir.IrOp) -> None:
    x, r = ones(), torch.zeros(4, 8)
    for _ in range(5):
        x, r = inplace.maybe_inplace(x, r)
    expected = torch.ones(4, 8), torch.zeros(4, 8)
    for _ in range(5):
        expected = both(*expected)
    assert torch.equal(x, expected[0])
    assert torch.equal(r, expected[1])


def test_a_parameter_is_neither_filled_nor_reported(inplace: ir.IrOp) -> None:
    frozen, parameter = torch.nn.Parameter(ones(), requires_grad=False), torch.nn.Parameter(ones())
    inplace.maybe_inplace(frozen, ones())
    with torch.no_grad():
        inplace.maybe_inplace(parameter, parameter[:])
    assert frozen.sum() == parameter.sum() == 32


def test_a_call_that_needs_gradients_takes_nothing(inplace: ir.IrOp) -> None:
    x, r = ones().requires_grad_(), ones()
    y, _ = inplace.maybe_inplace(x, r)
    (y.sum() + x.sum() + r.sum()).backward()
    assert (x.grad == 3).all()


def test_a_tensor_that_requires_a_gradient_is_kept_without_gradients_too(inplace: ir.IrOp) -> None:
    x, r = ones().requires_grad_(), ones()
    with torch.no_grad():
        inplace.maybe_inplace(x, r)
    assert x.sum() == 32
    with pytest.raises(DonationError):
        r + 1


def test_inference_tensors(inplace: ir.IrOp) -> None:
    with torch.inference_mode():
        x, outside = ones(), ones()
        y, _ = inplace.maybe_inplace(x, ones())
        assert y.sum() == 128
        with pytest.raises(DonationError):
            x + 1
    inplace.maybe_inplace(outside, ones())
    with pytest.raises(DonationError):
        outside + 1


def test_a_backward_that_needs_a_donated_tensor_is_an_error(op: ir.IrOp) -> None:
    weight = ones().requires_grad_()
    x = ones()
    loss = (x * weight).sum()
    with torch.no_grad():
        op.maybe_inplace(x, ones())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_implementation_may_donate_what_it_was_given(declare: Declare, inplace: ir.IrOp) -> None:
    outer = declare(both, allow_inplace=True)

    @outer.register_impl("calls", inplace=True)
    def calls(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return inplace.maybe_inplace(x, x_residual, weight)

    for _ in range(2):
        y, r = outer.maybe_inplace(ones(), ones())
        assert (y.sum(), r.sum()) == (128, 64)
        assert outer(ones(), ones())[1].sum() == 64


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_first_donation_leaves_as_it_came(op: ir.IrOp) -> None:
    x = ones()
    with _Counting() as outer, FlopCounterMode(display=False):
        op.maybe_inplace(x, ones())
        assert outer.seen == ["aten.ones.default", f"irframework.{op.name}.maybe_inplace"]
    assert [type(mode) for mode in _get_current_dispatch_mode_stack()] == [donation._Watch]
    before = len(outer.seen)
    ones()
    assert len(outer.seen) == before
    with pytest.raises(DonationError), _Counting():
        x + 1


def test_another_thread_is_reported_too(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    found: list[str] = []

    def use() -> None:
        for call in (lambda: op(x, ones()), lambda: op(ones(), ones()) and x + 1):
            try:
                call()
            except DonationError as error:
                found.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert ["used by 'test_op" in found[0], "used by 'add'" in found[1]] == [True, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_goes_on_looking(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())

    def use(results: Any) -> None:
        try:
            op.maybe_inplace(ones(), ones())
            x + 1
        except DonationError:
            results.put("found")

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with donation._remembered.lock:  # as if another thread held it
        process = context.Process(target=use, args=(results,))
        process.start()
    assert results.get(timeout=60) == "found"
    process.join()


def test_a_compiled_function_is_compiled_and_right(inplace: ir.IrOp) -> None:
    def stack(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x, r = inplace.maybe_inplace(x, r)
        return x.sin(), r

    graphs = []

    def count(module: Any, example_inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    expected = stack(ones(), ones())
    assert donation._of_thread.mode is not None
    for backend in (count, "irframework"):
        compiled = torch.compile(stack, backend=backend, fullgraph=True)
        for _ in range(2):
            x, r = ones(), ones()
            torch.testing.assert_close(compiled(x, r), expected)
    assert len(graphs) == 1


def test_a_compiled_function_that_is_given_a_donated_tensor(op: ir.IrOp) -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, backend="inductor", fullgraph=True)
    x = ones()
    compiled(x)
    op.maybe_inplace(x, ones())
    with contextlib.suppress(DonationError):  # where compiled code calls a torch op
        assert compiled(x).isnan().all()


def test_tracing_is_left_alone(op: ir.IrOp) -> None:
    op.maybe_inplace(ones(), ones())

    def call(x: Tensor) -> Tensor:
        y, _ = op.maybe_inplace(x, ones())
        return y * 2

    for tracing_mode in ("real", "fake", "symbolic"):
        graph = torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode=tracing_mode)(ones())
        targets = [
            str(node.target) for node in graph.graph.find_nodes(op="call_function", target=op.maybe_inplace.torch_op)
        ]
        assert len(targets) == 1
        assert "fill" not in graph.code
        assert graph(ones()).sum() == 256


def test_export(op: ir.IrOp) -> None:
    op.maybe_inplace(ones(), ones())

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op.maybe_inplace(x, ones())[0]

    for strict in (False, True):
        exported = torch.export.export(Model(), (ones(),), strict=strict)
        assert exported.module()(ones()).sum() == 128


def test_higher_order_operators(op: ir.IrOp) -> None:
    x = ones()
    op.maybe_inplace(x, ones())
    y = torch.cond(torch.tensor(True), lambda a: a + 1, lambda a: a - 1, (ones(),))
    assert y.sum() == 64


def test_subclasses_are_looked_into(op: ir.IrOp) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = ones()
    wrapped = TwoTensor(x, ones())
    op.maybe_inplace(x, ones())
    with pytest.raises(DonationError):
        wrapped + 1
    assert (TwoTensor(ones(), ones()) + 1).a.sum() == 64


def test_fake_tensors_are_left_alone(op: ir.IrOp) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = ones()
        y, _ = op.maybe_inplace(x, ones())
        assert (x + y).shape == (4, 8)


def test_vmap(op: ir.IrOp) -> None:
    op.maybe_inplace(ones(), ones())
    y, _ = torch.func.vmap(op.maybe_inplace)(ones(2, 4, 8), ones(2, 4, 8))
    assert y.sum() == 256


def test_without_the_setting_nothing_is_looked_at(op: ir.IrOp) -> None:
    code = """
    import sys, torch
    import irframework as ir
    x, r = torch.ones(4, 8), torch.ones(4, 8)
    ir.ops.fused_add_rms_norm.maybe_inplace(x, r, None, 1e-6)
    ir.ops.fused_add_rms_norm.maybe_inplace(x, r, None, 1e-6)
    assert "irframework.donation" not in sys.modules
    assert not torch._C._len_torch_dispatch_stack()
    """
    environment = {name: value for name, value in os.environ.items() if name != "IRFRAMEWORK_CHECK_DONATION"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)
    assert op.name


def test_the_variable_turns_it_on() -> None:
    code = """
    import torch
    import irframework as ir
    x = torch.ones(4, 8)
    ir.ops.fused_add_rms_norm.maybe_inplace(x, torch.ones(4, 8), None, 1e-6)
    try:
        x + 1
    except ir.errors.DonationError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "IRFRAMEWORK_CHECK_DONATION": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "donated to op 'fused_add_rms_norm'" in done.stdout
