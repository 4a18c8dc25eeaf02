"""Norms of sums over two GPUs, in memory that they share: values, equal bits, graphs, turns, and what is compiled.

Each test is two processes, which are killed when they take too long: a GPU that waits for the other one never ends.
"""

import pytest
import torch
from two_processes import run_in_processes

import irframework as ir
from irframework.distributed import enable_symmetric_memory

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("irframework_triton_kernels", reason="the plugin is not installed")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.distributed.is_nccl_available() or torch.cuda.device_count() < 2,
        reason="needs NCCL and two CUDA devices",
    ),
]

SECONDS = 150
SIZE, EPSILON, ROOM = 2, 1e-5, 128 * 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One row, several for a program, short and odd rows, rows that are not kept in registers; more than there is room for.
SHAPES = ((1, 4096), (16, 4096), (300, 96), (3, 129), (2, 3, 640), (1, 17000), (0, 64), (64, 4096))
NAMES = ("all_reduce_rms_norm", "all_reduce_fused_add_rms_norm")
STATIC, DYNAMIC = (f"{NAMES[1]}_{kind}_quant_fp8" for kind in ("static", "dynamic"))


def given(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def normed(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * (1 if weight is None else weight)


def near(got, exact, roundings):
    """Within `roundings` units of the dtype's precision, of numbers of at least one."""
    info = torch.finfo(got.dtype)
    allowed = roundings * info.eps * exact.abs().clamp(min=1)
    error = (got.double() - exact).abs()
    assert got.shape == exact.shape
    assert (error <= allowed).all(), f"{(error / allowed).max().item() * roundings:.1f} units off"


def begin():
    """The group's name, with the kernels of the plugin and memory to share."""
    from irframework_triton_kernels import implementations

    implementations.register("triton")
    enable_symmetric_memory(one_shot_bytes=ROOM)
    return torch.distributed.group.WORLD.group_name


# --- what the processes do -------------------------------------------------------------------------------------------


def values(rank):
    from irframework_triton_kernels import launch

    name, scale = begin(), torch.full((1,), 0.03, device="cuda")
    found = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            x, residual, weight = (
                each.cuda()
                for each in (
                    given(rank, *shape, dtype=dtype),
                    given(7, *shape, dtype=dtype),
                    given(8, shape[-1], dtype=dtype),
                )
            )
            with ir.priority(dict.fromkeys((*NAMES, STATIC, DYNAMIC), "triton")):
                sums = ir.ops.all_reduce_rms_norm(x, None, EPSILON, name)
                added = ir.ops.all_reduce_fused_add_rms_norm(x, residual, weight, EPSILON, name)
                static = getattr(ir.ops, STATIC)(x, residual, weight, scale, EPSILON, name)
                dynamic = getattr(ir.ops, DYNAMIC)(x, residual, weight, EPSILON, name)
                chosen = {op.dispatch(*arguments).provider for op, arguments in (
                    (ir.ops.all_reduce_rms_norm, (x, None, EPSILON, name)),
                    (ir.ops.all_reduce_fused_add_rms_norm, (x, residual, weight, EPSILON, name)),
                    (getattr(ir.ops, STATIC), (x, residual, weight, scale, EPSILON, name)),
                    (getattr(ir.ops, DYNAMIC), (x, residual, weight, EPSILON, name)),
                )}  # fmt: skip
            # A sum of two numbers has one rounding, so NCCL's has the same bits; and so has what comes behind it.
            total = ir.ops.all_reduce.native(x, name)
            apart = [
                *launch.fused_add_rms_norm(total, residual, weight, EPSILON, None),
                *launch.fused_add_rms_norm_static_quant_fp8(total, residual, weight, scale, EPSILON),
                *launch.fused_add_rms_norm_dynamic_quant_fp8(total, residual, weight, EPSILON),
            ]
            same = [
                torch.equal(one.float(), other.float())
                for one, other in zip((*added, *static, *dynamic), apart, strict=True)
            ]
            found[shape, dtype] = [each.cpu() for each in (*sums, *added)], chosen, same
    return found


def turns(rank, count):
    """How many numbers of many calls in a row are wrong, counted on the device, each GPU at its own pace."""
    from irframework_triton_kernels import launch

    name = begin()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    shapes = [(1, 4096), (16, 2048), (3, 640), (32, 1024), (128, 256), (7, 4096), (200, 8), (1, 8192)]
    xs = [torch.empty(shape, device="cuda") for shape in shapes]
    pace = torch.Generator().manual_seed(rank)
    for call in range(count):
        x = xs[call % len(xs)].fill_(SIZE * call + rank)
        if torch.rand((), generator=pace) < 0.1:
            torch.cuda._sleep(int(torch.randint(1, 200_000, (), generator=pace)))
        y, total = launch.all_reduce_rms_norm(x, None, EPSILON, name)
        wrong += (total != 2 * SIZE * call + 1).sum() + (y - 1).abs().gt(1e-3).sum() * (call > 10)
    return wrong.item()


def graphs(rank, dtype, replays):
    """Several calls in one graph, replayed with other inputs, in turn with calls outside it."""
    from irframework_triton_kernels import launch

    name = begin()
    x, residual, weight = (torch.zeros(16, 2048, dtype=dtype, device="cuda") for _ in range(3))
    weight = weight[0].fill_(1)

    def run():
        y, first = launch.all_reduce_fused_add_rms_norm(x, residual, weight, EPSILON, name)
        z, second = launch.all_reduce_rms_norm(y[:5], weight, EPSILON, name)
        return y, first, z, second

    inputs = [(given(2 * call + rank, 16, 2048, dtype=dtype).cuda(), given(-call - 1, 16, 2048, dtype=dtype).cuda())
              for call in range(replays)]  # fmt: skip
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph, results, eager = torch.cuda.CUDAGraph(), [], []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        outputs = run()
    for call, (one, other) in enumerate(inputs):
        x.copy_(one)
        residual.copy_(other)
        graph.replay()
        results.append([each.clone() for each in outputs])
        if call % 3 == 0:
            eager.append((call, [each.clone() for each in run()]))
    for one, other in inputs:  # once more, without waiting, so that one process runs ahead
        x.copy_(one)
        residual.copy_(other)
        graph.replay()
    last = [each.clone() for each in outputs]
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for call, made in eager for a, b in zip(made, results[call], strict=True))
    same = same and all(torch.equal(a, b) for a, b in zip(last, results[-1], strict=True))
    return same, [[each.cpu() for each in made] for made in results]


def compiled(rank, dtype):
    """A program that is written with the parts of the ops, as Inductor compiles it, and the same without fusion."""
    name = begin()
    others = [each for each in ir.ops.__all__ if getattr(ir.ops, each).fuse and each not in NAMES]
    weight = given(9, 1024, dtype=dtype).cuda()

    def program(x, residual):
        y, residual = ir.ops.fused_add_rms_norm(ir.ops.all_reduce(x, name), residual, weight, EPSILON)
        y, residual = ir.ops.fused_add_rms_norm(ir.ops.all_reduce(y * 0.5, name), residual, weight, EPSILON)
        total = ir.ops.all_reduce(y + residual, name)
        return ir.ops.rms_norm(total, weight, EPSILON), total

    found = {}
    for fusion in (True, False):
        torch._dynamo.reset()
        ir.configure(ir.KernelConfig(fusion=fusion, disable_fusions=others))
        run = torch.compile(program, backend="irframework", fullgraph=True, dynamic=True)
        with torch.no_grad(), ir.priority(dict.fromkeys((*NAMES, "rms_norm", "fused_add_rms_norm"), "triton")):
            for rows in (3, 40, 5, 200, 2):  # 200 rows of float32 are more than there is room for
                x, residual = (given(seed, rows, 1024, dtype=dtype).cuda() for seed in (rank, 7))
                for _ in range(3):
                    outputs = run(x, residual)
                found[fusion, rows] = [each.cpu() for each in outputs]
        report = ir.last_report()
        found[fusion] = report.fusions, {op: set(report.selected_impls.get(op, {}).values()) for op in NAMES}
    return found


# --- what is said about it -------------------------------------------------------------------------------------------


def test_values_are_those_of_float64_and_equal_in_both_processes():
    done = run_in_processes(values, backend="nccl", seconds=SECONDS)
    for shape in SHAPES:
        for dtype in DTYPES:
            (first, chosen, same), (other, *_) = (each[shape, dtype] for each in done)
            assert chosen == {"triton"}
            assert all(same), (shape, dtype, same)
            for one, another in zip(first, other, strict=True):
                assert torch.equal(one, another), (shape, dtype)
            y, total, z, residual = first
            exact = sum(given(rank, *shape, dtype=dtype).double() for rank in range(SIZE))
            before, weight = given(7, *shape, dtype=dtype).double(), given(8, shape[-1], dtype=dtype).double()
            near(total, exact, 2)
            near(residual, exact + before, 4)
            near(y, normed(total.double(), None), 8)
            near(z, normed(residual.double(), weight), 8)


def test_processes_at_any_pace_add_up_what_belongs_together():
    assert run_in_processes(turns, 4000, backend="nccl", seconds=SECONDS) == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_is_replayed_with_other_inputs(dtype):
    replays = 100
    (same, first), (same_there, other) = run_in_processes(graphs, dtype, replays, backend="nccl", seconds=SECONDS)
    assert same
    assert same_there
    for call in range(replays):
        for one, another in zip(first[call], other[call], strict=True):
            assert torch.equal(one, another)
        y, residual, z, second = first[call]
        xs = [given(2 * call + rank, 16, 2048, dtype=dtype).double() for rank in range(SIZE)]
        near(residual, sum(xs) + given(-call - 1, 16, 2048, dtype=dtype).double(), 4)
        near(y, normed(residual.double(), None), 8)
        near(second, 2 * y[:5].double(), 1)
        near(z, normed(second.double(), None), 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_models_are_compiled_to_adds_up_and_norms_in_one_kernel(dtype):
    done = run_in_processes(compiled, dtype, backend="nccl", seconds=SECONDS)
    for each in done:
        assert each[True] == (
            {"all_reduce_rms_norm": 1, "all_reduce_fused_add_rms_norm": 2},
            {name: {"triton"} for name in NAMES},
        )
        assert each[False][0] == {}
        for rows in (3, 40, 5, 200, 2):
            for fused, plain, there in zip(each[True, rows], each[False, rows], done[0][True, rows], strict=True):
                assert torch.equal(fused, there)  # in both processes
                near(fused, plain.double(), 8)
