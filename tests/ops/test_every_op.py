"""What holds for every standard op, whatever it computes: shapes without data, purity, layouts, symbolic sizes."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("seeded")

NAMES = tuple(ir.ops.__all__)
SCANS = ("selective_scan", "mamba2_chunk_scan")  # tracing one takes seconds: once is enough, and natively says more
EVERY_OP = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _natively():
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield


def usual(name: str, shape: tuple[int, ...] = (4, 64), dtype: torch.dtype = torch.float32) -> tuple:
    return getattr(ir.ops, name).generate_inputs(shape=shape, dtype=dtype)


def calls(name: str, shape: tuple[int, ...] = (4, 64), dtype: torch.dtype = torch.float32) -> list[tuple]:
    """All calls that the op's generator finds worth testing."""
    op = getattr(ir.ops, name)
    made = op.input_generator(shape=shape, dtype=dtype, device="cpu")
    return [op.bind(args) for args in ([made] if isinstance(made, tuple) else made)]


def moved(args: tuple, place) -> tuple:
    return tuple(place(a) if isinstance(a, Tensor) else a for a in args)


def described(outputs) -> list:
    return [None if o is None else (o.shape, o.dtype, o.stride()) for o in _flat(outputs)]


def _flat(outputs) -> tuple:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def same(got, wanted) -> None:
    for one, other in zip(_flat(got), _flat(wanted), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, equal_nan=True)


@EVERY_OP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_known_without_data(name, dtype):
    op = getattr(ir.ops, name)
    for args in calls(name, dtype=dtype):
        real = op(*args)
        assert all(o is None or o.is_contiguous() for o in _flat(real))
        with FakeTensorMode() as mode:
            assert described(op(*moved(args, mode.from_tensor))) == described(real)
        assert described(op(*moved(args, lambda t: t.to("meta")))) == described(real)


@EVERY_OP
def test_arguments_are_left_alone_and_results_are_new_memory(name):
    op = getattr(ir.ops, name)
    for args in calls(name):
        before = moved(args, torch.clone)
        outputs = op(*args)
        same([a for a in args if isinstance(a, Tensor)], [b for b in before if isinstance(b, Tensor)])
        memory = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and a.numel()}
        assert not any(o.untyped_storage().data_ptr() in memory for o in _flat(outputs) if o is not None and o.numel())


@EVERY_OP
def test_strides_of_arguments_change_nothing(name):
    op, args = getattr(ir.ops, name), usual(name)

    def strided(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        return torch.stack((tensor, tensor), -1)[..., 0]

    same(op(*moved(args, strided)), op(*args))


@EVERY_OP
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (0, 64)])
def test_one_token_more_dimensions_and_none_at_all(name, shape):
    op = getattr(ir.ops, name)
    try:
        args = usual(name, shape)
        outputs = op(*args)
    except errors.ArgumentError:  # its rows have another form
        assert len(shape) == 3
        return
    assert all(o is None or isinstance(o, Tensor) for o in _flat(outputs))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SCANS])
def test_compiled_for_any_size_it_gives_the_same(name):
    op, args = getattr(ir.ops, name), usual(name)
    torch._dynamo.reset()
    compiled = torch.compile(op, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        same(compiled(*args), op(*args))


@EVERY_OP
def test_native_is_traced_with_symbolic_sizes(name):
    op, args = getattr(ir.ops, name), usual(name)
    torch._dynamo.reset()
    compiled = torch.compile(op.native, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        same(compiled(*args), op(*args))


@EVERY_OP
def test_gradients_flow_to_what_can_have_them(name):
    op, args = getattr(ir.ops, name), usual(name)
    given = moved(args, lambda t: t.detach().requires_grad_() if t.dtype == torch.float32 else t)
    outputs = [o for o in tree_leaves(op(*given)) if isinstance(o, Tensor) and o.dtype == torch.float32]
    if not any(o.requires_grad for o in outputs):
        return
    sum(o.sum() for o in outputs if o.requires_grad).backward()
    gradients = [a.grad for a in given if isinstance(a, Tensor) and a.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)
