"""Norms of sums over processes, run by Triton's interpreter: values, and how processes take turns in shared memory.

In one process, buffers stand for the memory of the others, which have been there already. In several processes a mapped
file is memory that they really share.
"""

import random as dice
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from two_processes import run_in_processes

import irframework as ir
from irframework.distributed import shared_memory
from irframework.distributed.shared_memory import bytes_of, laid_out

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# One of each kind: shorter than a tile, odd, wider than what one program keeps in registers.
LENGTHS = (1, 3, 640, 16387)
PROGRAMS = 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    """The launches, with few programs: the interpreter runs one after the other."""
    from irframework_triton_kernels import launch
    from irframework_triton_kernels.launch import sums

    monkeypatch.setattr(sums, "PROGRAMS", PROGRAMS)
    return launch


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


@dataclass
class Group:
    """Memory of some processes in this one, as that of rank `rank` sees it before its call number `call`."""

    size: int
    capacity: int
    rank: int = 0
    call: int = 1

    def __post_init__(self) -> None:
        self.buffers = [torch.zeros(bytes_of(self.size, self.capacity), dtype=torch.uint8) for _ in range(self.size)]
        self.memory = laid_out([buffer.data_ptr() for buffer in self.buffers], self.rank, self.capacity, CPU)
        self.memory.counts.fill_(self.call - 1)

    def signals(self, rank: int) -> Tensor:
        """`[programs, size]` of a process."""
        count = shared_memory.PROGRAMS * self.size
        return self.buffers[rank][: 4 * count].view(torch.int32).view(-1, self.size)

    def data(self, rank: int, half: int, like: Tensor) -> Tensor:
        """What a process has in a half of its memory, seen as a tensor."""
        first = len(self.buffers[rank]) - (2 - half) * self.memory.capacity
        return self.buffers[rank][first : first + like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def come(self, xs: list[Tensor], ahead: int = 0) -> None:
        """Let all others write what they have, and signal that."""
        for rank, x in enumerate(xs):
            if rank != self.rank:
                self.data(rank, self.call % 2, x).copy_(x)
                self.signals(self.rank)[:, rank] = self.call + ahead


def bytes_for(x: Tensor) -> int:
    return x.numel() * x.element_size()


def summed(group: Group, xs: list[Tensor], x_residual: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the kernel makes in the process of `group`, when the others have come."""
    from irframework_triton_kernels.launch import sums

    group.come(xs)
    x = xs[group.rank]
    y, residual = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    sums.sum_and_norm(group.memory, x, x_residual, weight, y, residual, 1e-5)
    return y, residual


def parts(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(*shape, dtype=dtype, seed=rank) for rank in range(size)]


def assert_near(got: Tensor, exact: Tensor, roundings: float) -> None:
    """Within `roundings` units of the dtype's precision; the interpreter truncates where a device rounds."""
    info = torch.finfo(got.dtype)
    error = (got.double() - exact).abs()
    allowed = roundings * info.eps * (exact.abs() + 1)
    assert got.shape == exact.shape
    assert (error <= allowed).all(), f"{((error / allowed).max() * roundings).item():.2f} units off"


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_added_up_and_normed(dtype, hidden):
    xs, weight = parts(3, 5, hidden, dtype=dtype), random(hidden, dtype=dtype)
    y, total = summed(Group(3, bytes_for(xs[0])), xs, None, weight)
    assert_near(total, sum(x.double() for x in xs), 2)
    assert_near(y, ir.ops.rms_norm.native(total.double(), weight.double(), 1e-5), 4)


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_residual_is_added_before_the_norm(dtype, hidden):
    xs, x_residual = parts(2, 5, hidden, dtype=dtype), random(5, hidden, dtype=dtype, seed=7)
    y, residual = summed(Group(2, bytes_for(xs[0])), xs, x_residual, None)
    assert_near(residual, sum(x.double() for x in xs) + x_residual.double(), 4)
    assert_near(y, ir.ops.rms_norm.native(residual.double(), None, 1e-5), 4)


def test_the_sum_is_rounded_before_a_residual_is_added():
    """As the unfused program rounds it. Below, 2048 + 1 is 2048 in float16, and with another 1 as well."""
    xs = [torch.full((1, 8), value, dtype=torch.float16) for value in (2048, 1)]
    _, residual = summed(Group(2, 16), xs, torch.ones(1, 8, dtype=torch.float16), None)
    assert residual.unique().tolist() == [2048]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_order_of_the_sum_is_that_of_ranks_in_every_process(rank):
    xs = [torch.full((2, 8), value) for value in (1e8, 1.0, -1e8)]
    _, total = summed(Group(3, 64, rank), xs, None, None)
    assert total.unique().tolist() == [(torch.tensor(1e8) + 1 - 1e8).item()]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_has_the_same_bits(rank):
    xs, weight = parts(2, 9, 320), random(320)
    expected = summed(Group(2, bytes_for(xs[0])), xs, xs[0], weight)
    for one, other in zip(summed(Group(2, bytes_for(xs[0]), rank), xs, xs[0], weight), expected, strict=True):
        assert torch.equal(one, other)


def test_it_is_what_the_kernels_of_the_parts_make(launch):
    xs, weight = parts(2, 9, 320), random(320)
    expected = launch.fused_add_rms_norm(xs[0] + xs[1], xs[0], weight, 1e-5, None)
    for one, other in zip(summed(Group(2, bytes_for(xs[0])), xs, xs[0], weight), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("hidden", [320, 16387])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_those_of_the_kernels_of_the_parts(launch, monkeypatch, hidden, dtype):
    from irframework_triton_kernels.launch import sums

    xs, weight, scale = parts(2, 3, hidden, dtype=dtype), random(hidden, dtype=dtype), torch.tensor([0.02])
    total = (xs[0].float() + xs[1].float()).to(dtype)
    for kind, arguments in (("static", (scale, 1e-5)), ("dynamic", (1e-5,))):
        group = Group(2, bytes_for(xs[0]))
        group.come(xs)
        monkeypatch.setattr(sums, "memory_of", lambda name, group=group: group.memory)
        name = f"fused_add_rms_norm_{kind}_quant_fp8"
        expected = getattr(launch, name)(total, xs[1], weight, *arguments)
        got = getattr(launch, f"all_reduce_{name}")(xs[0], xs[1], weight, *arguments, "0")
        assert group.memory.counts[0] == 1
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())


def test_rows_with_a_gap_between_them_are_added_up():
    wide = parts(2, 5, 100)
    xs, x_residual = [x[:, 7:71] for x in wide], wide[0][:, 30:94]
    y, residual = summed(Group(2, 5 * 64 * 4), xs, x_residual, None)
    assert_near(residual, (xs[0].double() + xs[1].double()) + x_residual.double(), 2)
    assert_near(y, ir.ops.rms_norm.native(residual.double(), None, 1e-5), 4)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_groups_of_any_size_add_up(size):
    xs = parts(size, 3, 16)
    _, total = summed(Group(size, bytes_for(xs[0]), size - 1), xs, None, None)
    assert_near(total, sum(x.double() for x in xs), 4)


# --- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 7, 2**31 - 2])
def test_a_call_signals_its_number_and_leaves_the_other_half_alone(call):
    xs = parts(3, 5, 16)
    group = Group(3, bytes_for(xs[0]), rank=1, call=call)
    for buffer in group.buffers:
        buffer[-2 * group.memory.capacity :] = 171
    summed(group, xs, None, None)
    assert torch.equal(group.data(1, call % 2, xs[1]), xs[1])
    assert (group.data(1, 1 - call % 2, torch.empty(group.memory.capacity, dtype=torch.uint8)) == 171).all()
    assert (group.memory.counts[:PROGRAMS] == call).all()
    for other in (0, 2):
        assert (group.signals(other)[:PROGRAMS, 1] == call).all()
        assert (group.signals(other)[:, [0, 2]] == 0).all()


def test_a_process_that_is_one_call_ahead_is_waited_for_no_longer():
    xs = parts(2, 5, 16)
    group = Group(2, bytes_for(xs[0]))
    group.come(xs, ahead=1)
    _, total = summed(group, xs, None, None)
    assert_near(total, xs[0].double() + xs[1].double(), 2)


def test_numbers_of_calls_begin_anew_behind_the_largest():
    xs = parts(2, 5, 16)
    group = Group(2, bytes_for(xs[0]), call=2**31 - 1)
    summed(group, xs, None, None)
    group.call = -(2**31)
    _, total = summed(group, xs, None, None)
    assert_near(total, xs[0].double() + xs[1].double(), 2)
    assert group.memory.counts[0] == -(2**31)


def test_a_process_without_rows_for_a_program_still_signals():
    xs = parts(2, 1, 4096)  # one tile, for the first of two programs
    group = Group(2, bytes_for(xs[0]))
    summed(group, xs, None, None)
    assert (group.signals(1)[:PROGRAMS, 0] == 1).all()


COUNT, ROOM = 15, 6 * 32 * 4


def work(rank: int, path: str) -> dict[str, list[Tensor]]:
    """What a process does, in memory that it shares with the other one."""
    from irframework_triton_kernels.launch import sums

    sums.PROGRAMS = PROGRAMS
    each = bytes_of(2, ROOM)
    whole = torch.from_file(path, shared=True, size=2 * each, dtype=torch.uint8)
    memory = laid_out([whole.data_ptr() + each * other for other in range(2)], rank, ROOM, CPU)
    sums.memory_of = lambda group: memory
    return {"calls": calls(rank, memory), **compiled(rank)}


def calls(rank: int, memory: shared_memory.SharedMemory) -> list[Tensor]:
    """Sums of changing shapes and values, each process at its own pace."""
    from irframework_triton_kernels.launch import sums

    pace, found = dice.Random(rank), []
    for call in range(COUNT):
        rows, hidden = 1 + call % 6, (32, 8, 24)[call % 3]
        x = torch.full((rows, hidden), float(call * 2 + rank))
        y, residual = torch.empty_like(x), torch.empty_like(x)
        if pace.random() < 0.3:
            time.sleep(0.01 * pace.random())
        sums.sum_and_norm(memory, x, None, None, y, residual, 1e-5)
        found.append(residual)
    return found


def compiled(rank: int) -> dict[str, list[Tensor]]:
    """A program that Inductor compiles for any number of rows, with what is registered as if this were a GPU."""
    from irframework_triton_kernels import sums

    names = ("all_reduce_rms_norm", "all_reduce_fused_add_rms_norm")
    for name in names:
        getattr(ir.ops, name).register_impl("stand_in")(getattr(sums, name))
    others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse and name not in names]
    ir.configure(ir.KernelConfig(disable_fusions=others))
    group, found = torch.distributed.group.WORLD.group_name, {}

    def program(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, residual = ir.ops.fused_add_rms_norm(ir.ops.all_reduce(x, group), residual, weight, 1e-5)
        total = ir.ops.all_reduce(y, group)
        return ir.ops.rms_norm(total, weight, 1e-5), total, residual

    run = torch.compile(program, backend="irframework", fullgraph=True, dynamic=True)
    with torch.no_grad(), ir.priority(dict.fromkeys(names, "stand_in")):
        for rows in (3, 6, 9):  # there is room for 6
            given = random(rows, 32, seed=rank), random(rows, 32, seed=7), random(32)
            found[f"compiled {rows}"] = list(run(*given))
            found[f"eager {rows}"] = list(program(*given))
    found["fusions"] = ir.last_report().fusions
    return found


@pytest.fixture(scope="module")
def done():
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "memory")
        path.write_bytes(bytes(2 * bytes_of(2, ROOM)))
        return run_in_processes(work, str(path))


def test_processes_at_any_pace_add_up_what_belongs_together(done):
    for found in done:
        for call, total in enumerate(found["calls"]):
            assert total.unique().tolist() == [4 * call + 1], call


def test_a_compiled_program_computes_what_its_parts_compute(done):
    for found in done:
        assert found["fusions"] == {"all_reduce_rms_norm": 1, "all_reduce_fused_add_rms_norm": 1}
        for rows in (3, 6, 9):
            for one, other, there in zip(
                found[f"compiled {rows}"], found[f"eager {rows}"], done[0][f"compiled {rows}"], strict=True
            ):
                assert torch.equal(one, there)
                torch.testing.assert_close(one, other)


# --- the ops ---------------------------------------------------------------------------------------------------------


def test_more_than_fits_is_added_up_by_the_groups_backend(launch, monkeypatch):
    from irframework_triton_kernels.launch import sums

    xs, weight = parts(2, 5, 64), random(64)
    group = Group(2, bytes_for(xs[0]) - 256)
    monkeypatch.setattr(sums, "memory_of", lambda name: group.memory)
    asked = []
    monkeypatch.setattr(sums.ir.ops.all_reduce, "native", lambda x, name: asked.append(name) or xs[0] + xs[1])
    expected = launch.fused_add_rms_norm(xs[0] + xs[1], xs[0], weight, 1e-5, None)
    for one, other in zip(launch.all_reduce_fused_add_rms_norm(xs[0], xs[0], weight, 1e-5, "0"), expected, strict=True):
        assert torch.equal(one, other)
    for kind, arguments in (("static", (torch.tensor([0.02]), 1e-5)), ("dynamic", (1e-5,))):
        name = f"fused_add_rms_norm_{kind}_quant_fp8"
        got = getattr(launch, f"all_reduce_{name}")(xs[0], xs[0], weight, *arguments, "0")
        expected = getattr(launch, name)(xs[0] + xs[1], xs[0], weight, *arguments)
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(got, expected, strict=True))
    y, total = launch.all_reduce_rms_norm(xs[0], weight, 1e-5, "0")
    assert torch.equal(total, xs[0] + xs[1])
    assert torch.equal(y, launch.rms_norm(total, weight, 1e-5, None))
    assert asked == ["0"] * 4
    assert (group.memory.counts == 0).all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_nothing_is_sent_for_nothing(launch, shape):
    x = random(*shape)
    for pair in (
        launch.all_reduce_rms_norm(x, None, 1e-5, "nobody"),
        launch.all_reduce_fused_add_rms_norm(x, x, None, 1e-5, "nobody"),
        launch.all_reduce_fused_add_rms_norm_static_quant_fp8(x, x, None, torch.ones(1), 1e-5, "nobody"),
        launch.all_reduce_fused_add_rms_norm_dynamic_quant_fp8(x, x, None, 1e-5, "nobody")[::2],
    ):
        assert [tuple(each.shape) for each in pair] == [shape, shape]


def test_whoever_traces_it_sees_one_op_with_symbolic_rows(launch):
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x, weight):
        return launch.all_reduce_fused_add_rms_norm(x, x, weight, 1e-5, "nobody")

    graph = make_fx(program, tracing_mode="symbolic")(random(4, 64), random(64)).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.irframework_triton_kernels.all_reduce_fused_add_rms_norm.default in called
