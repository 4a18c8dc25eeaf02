"""Collectives: of two processes against sums and concatenations written out, and of a process alone."""

import pytest
import torch
from two_processes import run_in_processes

import irframework as ir
from irframework import errors

SIZE = 2


# --- what the processes do -------------------------------------------------------------------------------------------


def given(rank, dtype=torch.float32):
    return (torch.arange(24.0).view(4, 6) * (rank + 1) - 10 * rank).to(dtype)


def calls(name):
    """Every call, by what it is about."""
    ops = ir.ops
    return {
        "sum": lambda x: ops.all_reduce(x, name),
        "max": lambda x: ops.all_reduce(x, name, "max"),
        "min": lambda x: ops.all_reduce(x, name, "min"),
        "product": lambda x: ops.all_reduce(x, name, "product"),
        "gather": lambda x: ops.all_gather(x, name, SIZE),
        "gather columns": lambda x: ops.all_gather(x, name, SIZE, -1),
        "scatter": lambda x: ops.reduce_scatter(x, name, SIZE),
        "scatter columns": lambda x: ops.reduce_scatter(x, name, SIZE, 1),
        "scatter max": lambda x: ops.reduce_scatter(x, name, SIZE, 0, "max"),
    }


def expected(xs, rank):
    total, largest = xs[0] + xs[1], torch.maximum(*xs)
    return {
        "sum": total,
        "max": largest,
        "min": torch.minimum(*xs),
        "product": xs[0] * xs[1],
        "gather": torch.cat(xs, 0),
        "gather columns": torch.cat(xs, 1),
        "scatter": total.chunk(SIZE, 0)[rank],
        "scatter columns": total.chunk(SIZE, 1)[rank],
        "scatter max": largest.chunk(SIZE, 0)[rank],
    }


DIFFERENTIABLE = ("sum", "gather", "gather columns", "scatter", "scatter columns")
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "columns": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
}


def gradient(call, x):
    x = x.clone().requires_grad_()
    (call(x).pow(2).sum()).backward()
    return x.grad


def message(call):
    try:
        call()
    except errors.ArgumentError as error:
        return str(error)
    return "no error"


def work(rank):
    from torch._dynamo.testing import CompileCounter

    name = torch.distributed.group.WORLD.group_name
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    x = given(rank).to(device)
    each = calls(name)
    done = {"eager": {key: call(x).cpu() for key, call in each.items()}}
    done["layouts"] = {
        (layout, key): (out.cpu(), out.is_contiguous())
        for layout, change in LAYOUTS.items()
        for key, call in each.items()
        for out in [call(change(x))]
    }
    done["unchanged"] = x.cpu()
    done["int64"] = {key: call(x.long()).cpu() for key, call in each.items()}
    done["bfloat16"] = {key: call(x.bfloat16()).cpu() for key, call in each.items()}
    done["empty"] = {key: tuple(call(x[:0]).shape) for key, call in each.items()}
    done["gradients"] = {key: gradient(each[key], x).cpu() for key in DIFFERENTIABLE}

    def all_calls(x):
        return {key: call(x) for key, call in each.items()}

    whole = torch.compile(all_calls, backend="aot_eager", fullgraph=True, dynamic=False)
    done["compiled"] = {key: out.cpu() for key, out in whole(x).items()}
    leaf = x.clone().requires_grad_()
    training = torch.compile(lambda x: [each[key](x) for key in DIFFERENTIABLE], backend="aot_eager", fullgraph=True)
    sum(out.pow(2).sum() for out in training(leaf)).backward()
    done["compiled gradients"] = leaf.grad.cpu()
    lowered = torch.compile(
        lambda x: each["scatter"](each["gather"](each["sum"](x))), backend="irframework", fullgraph=True
    )
    done["lowered"] = lowered(x).cpu()
    done["chosen"] = ir.last_report().selected_impls
    counter = CompileCounter()
    rows = torch.compile(lambda x: each["gather columns"](each["sum"](x)), backend=counter, dynamic=True)
    done["more rows"] = [rows(torch.cat([x] * count)).cpu() for count in (1, 2, 3)]
    done["compilations"] = counter.frame_count

    alone = [torch.distributed.new_group([r]) for r in range(SIZE)][rank]
    done["group of one"] = [
        ir.ops.all_reduce(x, alone.group_name).cpu(),
        ir.ops.all_gather(x, alone.group_name, 1).cpu(),
        ir.ops.reduce_scatter(x, alone.group_name, 1).cpu(),
    ]
    done["errors"] = {
        "unknown group": message(lambda: ir.ops.all_reduce(x, "nobody")),
        "other size": message(lambda: ir.ops.all_gather(x, name, 3)),
        "not divisible": message(lambda: ir.ops.reduce_scatter(x[:3], name, SIZE)),
        "gradient of max": message(lambda: gradient(each["max"], x)),
    }
    return done


# --- what is said about it -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done():
    return run_in_processes(work)


def test_two_processes_agree_with_what_is_written_out(done):
    check_results(done)


@pytest.mark.cuda
def test_two_devices_agree_with_what_is_written_out():
    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < SIZE:
        pytest.skip("needs NCCL and two CUDA devices")
    check_results(run_in_processes(work, backend="nccl"))


def check_results(done):
    xs = [given(rank) for rank in range(SIZE)]
    for rank in range(SIZE):
        want = expected(xs, rank)
        for key, out in want.items():
            assert torch.equal(done[rank]["eager"][key], out), key
            assert torch.equal(done[rank]["compiled"][key], out), key
        assert torch.equal(done[rank]["unchanged"], xs[rank])
        assert torch.equal(done[rank]["lowered"], (SIZE * torch.cat([want["sum"]] * 2)).chunk(2)[rank])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_the_dtype_is_kept(done, dtype):
    xs = [given(rank, dtype) for rank in range(SIZE)]
    for rank in range(SIZE):
        for key, out in expected(xs, rank).items():
            torch.testing.assert_close(done[rank][str(dtype).removeprefix("torch.")][key], out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing_and_outputs_are_contiguous(done, layout):
    for rank in range(SIZE):
        for key, out in done[rank]["eager"].items():
            got, contiguous = done[rank]["layouts"][layout, key]
            assert torch.equal(got, out)
            assert contiguous


def test_no_rows_give_no_rows(done):
    for key, shape in done[0]["empty"].items():
        assert shape == (0, {"gather columns": 12, "scatter columns": 3}.get(key, 6))


def test_gradients_are_those_of_the_sum_of_all_losses(done):
    leaves = [given(rank).requires_grad_() for rank in range(SIZE)]
    for key in DIFFERENTIABLE:
        loss = sum(expected(leaves, rank)[key].pow(2).sum() for rank in range(SIZE))
        for rank, gradient in enumerate(torch.autograd.grad(loss, leaves)):
            torch.testing.assert_close(done[rank]["gradients"][key], gradient)


def test_compiled_gradients_are_the_eager_ones(done):
    for each in done:
        torch.testing.assert_close(each["compiled gradients"], sum(each["gradients"].values()))


def test_compiled_code_runs_the_native_implementation_of_each(done):
    assert done[0]["chosen"] == {name: {name: "native"} for name in ("all_reduce", "all_gather", "reduce_scatter")}


def test_another_number_of_rows_is_not_compiled_anew(done):
    for each in done:
        assert each["compilations"] == 1
        for count, out in enumerate(each["more rows"], 1):
            assert torch.equal(out, torch.cat([done[0]["eager"]["sum"]] * count).repeat(1, 2))


def test_a_group_of_one_gives_a_copy(done):
    for rank in range(SIZE):
        assert all(torch.equal(out, given(rank)) for out in done[rank]["group of one"])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("unknown group", "Op 'all_reduce': there is no process group 'nobody'"),
        ("other size", "Op 'all_gather': group_size=3, but group '0' has size 2"),
        ("not divisible", "Op 'reduce_scatter': dimension 0 .* has 3 elements, which the 2 processes"),
        ("gradient of max", "Op 'all_reduce': op='max' has no gradient"),
    ],
)
def test_every_process_hears_what_is_wrong(done, wrong, problem):
    for each in done:
        with pytest.raises(errors.ArgumentError, match=problem):
            raise errors.ArgumentError(each["errors"][wrong])


# --- without a group -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_process_alone_gets_a_copy(name):
    x = torch.randn(3, 4).t()
    out = getattr(ir.ops, name)(x, "", *[1][: name != "all_reduce"])
    assert torch.equal(out, x)
    assert out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("compiled", [False, True])
def test_without_process_groups_a_name_is_an_error(compiled):
    def f(x):
        return ir.ops.all_reduce(x, "0")

    with pytest.raises(Exception, match=r"no process group '0', torch\.distributed is not initialised"):
        (torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f)(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda x: ir.ops.all_reduce(x, "", "mean"), "op must be one of 'sum', 'max', 'min', 'product', got 'mean'"),
        (lambda x: ir.ops.all_reduce(x > 0, ""), "'x' must be numbers, it has dtype torch.bool"),
        (lambda x: ir.ops.all_gather(x, "", 2), "group_size=2, but this process alone has size 1"),
        (lambda x: ir.ops.all_gather(x, "", 0), "group_size=0 must be at least 1"),
        (lambda x: ir.ops.all_gather(x, "", 1, 2), r"dim=2 is no dimension of argument 'x' of shape \(2, 3\)"),
        (lambda x: ir.ops.reduce_scatter(x[0, 0], "", 1), "dim=0 is no dimension"),
    ],
)
def test_a_wrong_argument_is_named(call, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        call(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_first_and_second_derivatives_are_right(name):
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    rest = ("",) if name == "all_reduce" else ("", 1)
    assert torch.autograd.gradcheck(lambda x: getattr(ir.ops, name)(x, *rest), (x,))
    assert torch.autograd.gradgradcheck(lambda x: getattr(ir.ops, name)(x, *rest).pow(2), (x,))
