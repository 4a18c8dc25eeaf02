"""Fused ops with collectives: their parts bit for bit, and by which provider they are fused. Values of two processes
are in `test_two_processes.py`."""

import pytest
import torch
from parallel_support import EPSILON, HIDDEN, group_without_processes, made_of

import irframework as ir
from irframework.distributed import enable_symmetric_memory, symmetric_memory
from irframework.errors import DeviceUnavailableError

ADDED = "all_reduce_fused_add_rms_norm"
CODES = (f"{ADDED}_static_quant_fp8", f"{ADDED}_dynamic_quant_fp8")
NAMES = ("all_reduce_rms_norm", ADDED, *CODES, "linear_reduce_scatter", "all_gather_linear")
SCALE = torch.tensor([0.03])
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def added_and_quantised(x, residual, weight, group, scale=None):
    """The parts of an op that ends in codes, with its outputs in order."""
    y, residual = ir.ops.fused_add_rms_norm(ir.ops.all_reduce(x, group), residual, weight, EPSILON)
    if scale is not None:
        return ir.ops.static_quant_fp8(y, scale), residual
    return *ir.ops.dynamic_quant_fp8(y), residual


def parts(name, x, residual, weight, matrix, bias):
    """Each op as its parts, for a process alone."""
    ops = ir.ops
    return {
        CODES[0]: lambda: added_and_quantised(x, residual, weight, "", SCALE),
        CODES[1]: lambda: added_and_quantised(x, residual, weight, ""),
        "all_reduce_rms_norm": lambda: (ops.rms_norm(ops.all_reduce(x, ""), weight, EPSILON), x),
        "all_reduce_fused_add_rms_norm": lambda: ops.fused_add_rms_norm(
            ops.all_reduce(x, ""), residual, weight, EPSILON
        ),
        "linear_reduce_scatter": lambda: (ops.reduce_scatter(ops.linear(x, matrix, bias), "", 1),),
        "all_gather_linear": lambda: (ops.linear(ops.all_gather(x, "", 1), matrix, bias),),
    }[name]()


def called(name, x, residual, weight, matrix, bias):
    arguments = {
        "all_reduce_rms_norm": (x, weight, EPSILON, ""),
        "all_reduce_fused_add_rms_norm": (x, residual, weight, EPSILON, ""),
        CODES[0]: (x, residual, weight, SCALE, EPSILON, ""),
        CODES[1]: (x, residual, weight, EPSILON, ""),
    }.get(name, (x, matrix, bias, "", 1))
    made = getattr(ir.ops, name)(*arguments)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_op_is_its_parts_bit_for_bit(name, dtype):
    x, residual = (torch.randn(3, HIDDEN).to(dtype) for _ in range(2))
    weight, matrix, bias = (torch.randn(size).to(dtype) for size in ((HIDDEN,), (5, HIDDEN), (5,)))
    given = (x, residual, weight, matrix, bias)
    for one, other in zip(called(name, *given), parts(name, *given), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.double(), other.double())


@pytest.fixture
def provider():
    """Registers a provider that does what native does, for ops by name."""
    taken = []

    def register(name):
        op = getattr(ir.ops, name)

        def implementation(*args):
            return op.native(*args)

        implementation.__signature__ = op.signature
        op.register_impl("stand_in")(implementation)
        taken.append(op)

    yield register
    for op in taken:
        op.unregister_impl("stand_in")


@pytest.fixture
def fusing(configured):
    """Only the ops of this module are fused: deriving all other definitions takes seconds."""

    def configure(**values):
        others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse and name not in NAMES]
        configured(disable_fusions=others, **values)

    return configure


def program(name, group):
    """A program that holds the op's parts, for a group of two."""
    weight, matrix = torch.ones(HIDDEN), torch.randn(5, HIDDEN)
    return {
        "all_reduce_rms_norm": lambda x: (ir.ops.rms_norm(s := ir.ops.all_reduce(x, group), weight, EPSILON), s),
        "all_reduce_fused_add_rms_norm": lambda x: ir.ops.fused_add_rms_norm(
            ir.ops.all_reduce(x, group), x, weight, EPSILON
        ),
        CODES[0]: lambda x: added_and_quantised(x, x, weight, group, SCALE),
        CODES[1]: lambda x: added_and_quantised(x, x, weight, group),
        "linear_reduce_scatter": lambda x: ir.ops.reduce_scatter(ir.ops.linear(x, matrix), group, 2),
        "all_gather_linear": lambda x: ir.ops.linear(ir.ops.all_gather(x, group, 2), matrix, matrix[:, 0]),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_its_parts_are_fused_for_a_provider_that_takes_it(name, provider, fusing):
    fusing()
    provider(name)
    with group_without_processes(2) as group, ir.priority({name: "stand_in"}):
        made = made_of(program(name, group), torch.randn(4, HIDDEN))
    assert made.report.fusions == {name: 1}
    assert set(made.report.selected_impls[name].values()) == {"stand_in"}


@pytest.mark.parametrize("name", NAMES)
def test_without_a_provider_its_parts_stay(name, fusing):
    fusing()
    with group_without_processes(2) as group:
        made = made_of(program(name, group), torch.randn(4, HIDDEN))
    assert made.report.fusions == {}
    assert [miss.reason for miss in made.report.missed_fusions if miss.op == name] == ["only native would run it"]


@pytest.mark.parametrize("name", CODES)
def test_a_quantised_norm_of_a_sum_is_one_op_although_the_quantised_norm_is_one_too(name, provider, configured):
    smaller = name.removeprefix("all_reduce_")
    configured(disable_fusions=[each for each in ir.ops.__all__ if getattr(ir.ops, each).fuse and smaller not in each])
    for each in (name, smaller):
        provider(each)
    with group_without_processes(2) as group, ir.priority({name: "stand_in", smaller: "stand_in"}):
        made = made_of(program(name, group), torch.randn(4, HIDDEN))
    assert made.report.fusions == {name: 1}


def test_a_product_that_gathers_its_tokens_comes_before_one_with_a_gate(provider, configured):
    """It hides what is sent. Where nobody has such a product, the gate is fused with it."""
    names = ("all_gather_linear", "linear_silu_and_mul")
    configured(disable_fusions=[each for each in ir.ops.__all__ if getattr(ir.ops, each).fuse and each not in names])
    for each in names:
        provider(each)
    weight = torch.randn(2 * HIDDEN, HIDDEN)
    found = {}
    with group_without_processes(2) as group:

        def program(x):
            return ir.ops.silu_and_mul(ir.ops.linear(ir.ops.all_gather(x, group, 2), weight))

        for first in ("stand_in", "native"):
            with ir.priority({names[0]: first, names[1]: "stand_in"}):
                found[first] = made_of(program, torch.randn(4, HIDDEN)).report.fusions
    assert found == {"stand_in": {"all_gather_linear": 1}, "native": {"linear_silu_and_mul": 1}}


def test_a_sum_that_somebody_else_reads_is_not_hidden_in_a_fused_op(provider, fusing):
    fusing()
    provider("all_reduce_fused_add_rms_norm")

    def program(x, group):
        total = ir.ops.all_reduce(x, group)
        return *ir.ops.fused_add_rms_norm(total, x, None, EPSILON), total

    with group_without_processes(2) as group, ir.priority(all_reduce_fused_add_rms_norm="stand_in"):
        made = made_of(lambda x: program(x, group), torch.randn(4, HIDDEN))
    assert made.report.fusions == {}
    assert "is also used by output" in made.report.missed_fusions[0].reason


# --- torch's kernels in symmetric memory -----------------------------------------------------------------------------


def test_symmetric_memory_needs_cuda_and_a_group():
    with pytest.raises(DeviceUnavailableError, match="needs CUDA and a process group"):
        enable_symmetric_memory()


@pytest.fixture
def shared():
    """The provider `symm_mem`, as it is registered where somebody asks for it."""
    symmetric_memory.register()
    yield symmetric_memory.PROVIDER
    for op in (ir.ops.linear_reduce_scatter, ir.ops.all_gather_linear, ir.ops.all_reduce):
        op.unregister_impl(symmetric_memory.PROVIDER)


@pytest.mark.parametrize("name", ["linear_reduce_scatter", "all_gather_linear", "all_reduce"])
def test_a_group_that_nobody_asked_for_shares_no_memory_and_it_is_said(name, shared):
    x = torch.empty(16, 16, device="meta", dtype=torch.bfloat16)
    arguments = (x, "0") if name == "all_reduce" else (x, x, None, "0", 2)
    decline = getattr(ir.ops, name).impls[shared].supports_args(*arguments)
    assert "group '0' shares no memory" in decline.reason
    assert "enable_symmetric_memory" in decline.reason


@pytest.mark.parametrize("reduction", ["max", "product"])
def test_only_sums_are_one_shot(reduction, shared):
    x = torch.empty(16, 16, device="meta")
    assert ir.ops.all_reduce.impls[shared].supports_args(x, "0", reduction).reason == "only sums are one-shot"


def test_which_groups_share_memory_is_in_the_cache_key(monkeypatch):
    from irframework.compiler.pipeline import PrePass

    before = PrePass().uuid()
    monkeypatch.setitem(symmetric_memory._buffers, "0", torch.empty(8, dtype=torch.uint8))
    assert PrePass().uuid() != before


@pytest.mark.parametrize(
    ("elements", "one_shot"), [(0, False), (3, False), (4, True), (6, False), (8, True), (12, False)]
)
def test_sums_are_one_shot_that_fit_and_that_torch_can_read_in_whole_steps(elements, one_shot, shared, monkeypatch):
    from torch.distributed import _symmetric_memory  # noqa: F401 -- declares its ops

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", lambda place, x, op, group: x + 1, "CPU")
    with group_without_processes(2) as group:
        monkeypatch.setitem(symmetric_memory._buffers, group, torch.empty(32, dtype=torch.uint8))
        x = torch.zeros(elements)
        assert ir.ops.all_reduce.impls[shared].supports_args(x, group) is True
        torch.testing.assert_close(symmetric_memory.sum_by_one_shot(x, group), x + 1 if one_shot else x)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_implementations_of_symm_mem_are_compiled_by_inductor_for_any_number_of_rows(dynamic, configured):
    from torch.distributed import _symmetric_memory  # noqa: F401 -- declares its ops

    configured(fusion=False)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_matmul_reduce_scatter", lambda a, b, *rest: (a @ b)[: len(a) // 2].contiguous(), "CPU")
    library.impl(
        "fused_all_gather_matmul", lambda a, bs, *rest, **keys: (None, [torch.cat((a, a)) @ b for b in bs]), "CPU"
    )
    bodies = {"linear_reduce_scatter": symmetric_memory.product_and_scatter}
    bodies |= {"all_gather_linear": symmetric_memory.gather_and_product, "all_reduce": symmetric_memory.sum_by_one_shot}
    up, down, bias = torch.randn(8, HIDDEN), torch.randn(HIDDEN, 8), torch.randn(8)
    symmetric_memory.one_shot_all_reduce()
    with group_without_processes(2) as group:

        def program(x):
            y = ir.ops.all_gather_linear(x.tanh(), up, bias, group, 2).relu()
            z = ir.ops.linear_reduce_scatter(y, down, torch.ones(HIDDEN), group, 2) + 1
            return ir.ops.all_reduce(2 * z, group) + 1

        for name, body in bodies.items():
            getattr(ir.ops, name).register_impl("stand_in")(body)
        try:
            with torch.no_grad(), ir.priority(dict.fromkeys(bodies, "stand_in")):
                compiled = torch.compile(program, backend="irframework", fullgraph=True, dynamic=dynamic)
                for rows in (4, 6):
                    x = torch.randn(rows, HIDDEN)
                    y = (torch.cat((x, x)).tanh() @ up.T + bias).relu()
                    torch.testing.assert_close(compiled(x), 2 * ((y @ down.T)[:rows] + 2) + 1)
        finally:
            for name in bodies:
                getattr(ir.ops, name).unregister_impl("stand_in")
