"""A residual stack with in-place norms: no copy is left, and the norms allocate nothing."""

import re
import weakref

import pytest
import torch
from compiler_support import report, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import irframework as ir

LAYERS = 32


@pytest.fixture(autouse=True)
def _no_cache():
    """A hit runs no pass and has no report."""
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.fixture(params=["own op", "fused_add_rms_norm"])
def norm(request, add):
    """(op, in-place provider, further arguments): an op declared here, and a standard one with real kernels."""
    if request.param == "own op":
        return add.op, "inp", ()
    impl = ir.ops.fused_add_rms_norm.impls.get("vllm_c")
    if impl is None or not impl.supported:
        pytest.skip("the plugin irframework-vllm-c, which has in-place kernels for the CPU, is not installed")
    return ir.ops.fused_add_rms_norm, "vllm_c", (1e-6,)


def stack(form, more, layers=LAYERS):
    """A product, and a norm that adds the residual, per layer."""

    def f(x, r, w, m):
        for _ in range(layers):
            x, r = form(x @ m, r, w, *more)
        return x, r

    return f


def inputs(size=64, device="cpu"):
    return (
        torch.randn(16 if device == "cpu" else size, size, device=device),
        torch.randn(16 if device == "cpu" else size, size, device=device),
        torch.rand(size, device=device),
        torch.randn(size, size, device=device) / size**0.5 / 2,
    )


def check_that_no_copy_is_left(op, provider, arguments, results):
    """Of the stack that was compiled last: `arguments` are what it was called with, `results` what it returned."""
    assert list(report().selected_impls[op.name].values()) == [provider] * LAYERS
    assert (report().clones_inserted, report().clones_removed, report().kept_copies) == (2 * LAYERS, 2 * LAYERS, [])
    text = list(report().graphs.values())[-1]
    assert not re.search(r"clone|copy|empty|irframework\.", text)
    assert results[1].data_ptr() == arguments[1].data_ptr()  # the residual stream is the donated input


def functional(norm, arguments):
    op, _, more = norm
    with torch.no_grad(), ir.priority({op.name: ["native"]}):
        return stack(op, more)(*arguments)


def test_no_copy_is_left_in_a_residual_stack(norm):
    op, provider, more = norm
    arguments = inputs()
    want = functional(norm, arguments)
    with ir.priority({op.name: [provider]}):
        got = run(stack(op.maybe_inplace, more), *arguments)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    check_that_no_copy_is_left(op, provider, arguments, got)


class Allocations(TorchDispatchMode):
    """Counts what torch ops allocate: storages of results that are no argument's."""

    def __init__(self):
        super().__init__()
        self.sizes, self.live, self.peak = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in known:
                storage = value.untyped_storage()
                self.sizes.append(storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size):
        self.live -= size


def allocations_of(function, arguments, monkeypatch):
    """What the lowered graph of a function allocates when it is run op by op."""
    modules = []
    original = ir.compiler.lower

    def lower(*given, **options):
        modules.append(original(*given, **options))
        return modules[-1]

    monkeypatch.setattr(ir.compiler, "lower", lower)
    run(function, *(t.clone() for t in arguments))
    (module,) = modules
    order = [node.name for node in module.graph.find_nodes(op="placeholder")]
    given = dict(zip(order, in_graph_order(module, arguments), strict=True))
    with torch.no_grad(), Allocations() as counted:
        module(*given.values())
    return counted


def in_graph_order(module, arguments):
    """The graph takes its inputs in the order of first use: tell them apart by shape and by what reads them."""
    x, r, w, m = (t.clone() for t in arguments)
    values = []
    for node in module.graph.find_nodes(op="placeholder"):
        shape = tuple(node.meta["val"].shape)
        if shape == tuple(w.shape):
            values.append(w)
        elif shape == tuple(m.shape):
            values.append(m)
        else:
            product = any(user.target is torch.ops.aten.mm.default for user in node.users)
            values.append(x if product else r)
    return values


def test_only_the_products_allocate(norm, monkeypatch):
    op, provider, more = norm
    arguments = inputs()
    size = arguments[0].nbytes
    with ir.priority({op.name: [provider]}):
        counted = allocations_of(stack(op.maybe_inplace, more), arguments, monkeypatch)
    assert counted.sizes == [size] * LAYERS
    assert counted.peak == 2 * size  # a product, and the one it is made from


def test_the_functional_stack_allocates_more(norm, monkeypatch):
    op, _, more = norm
    arguments = inputs()
    size = arguments[0].nbytes
    with ir.priority({op.name: ["native"]}):
        counted = allocations_of(stack(op, more), arguments, monkeypatch)
    assert len(counted.sizes) >= 3 * LAYERS
    assert counted.peak >= 3 * size


def test_without_donation_the_residual_costs_one_allocation(norm, monkeypatch):
    op, provider, more = norm
    arguments = inputs()
    size = arguments[0].nbytes
    with ir.priority({op.name: [provider]}):
        counted = allocations_of(stack(op, more), arguments, monkeypatch)
    assert counted.sizes == [size] * (LAYERS + 1)
    assert counted.peak == 3 * size


def generated(function, arguments, backend):
    """Inductor's wrapper code of a function, the most bytes that it held at once beside its inputs, and its results."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function, backend=backend)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, *(t.clone() for t in arguments))
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            results = compiled(*arguments)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    (code,) = codes
    return code[code.index("def call(") : code.index("runner = ")], most, results


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_inductor_allocates_nothing_for_the_norms(norm, backend):
    op, provider, more = norm
    arguments = inputs()
    want = functional(norm, arguments)
    with ir.priority({op.name: [provider]}):
        code, most, got = generated(stack(op.maybe_inplace, more), arguments, backend)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    check_that_no_copy_is_left(op, provider, arguments, got)
    allocated = set(re.findall(r"(\w+) = empty_strided\w*\(", code))
    assert allocated
    assert allocated <= set(re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", code))
    assert most == 2 * arguments[0].nbytes


@pytest.mark.parametrize("provider", ["inp", "native"])
def test_inductor_holds_more_for_the_functional_stack(add, provider):
    arguments = inputs()
    with add.priority(provider):
        _, most, _ = generated(stack(add.op, ()), arguments, "irframework")
    assert most >= 3 * arguments[0].nbytes


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores:UserWarning")  # Inductor's advice about speed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_peak_memory_on_the_gpu_is_that_of_the_products(add, backend):
    def peak(form, provider):
        """The most bytes held at once beside the inputs, without the work space of the first call."""
        compiled = torch.compile(stack(form, ()), backend=backend)
        arguments = inputs(size=2048, device="cuda")
        with torch.no_grad(), add.priority(provider):
            compiled(*(t.clone() for t in arguments))
            given = [t.clone() for t in arguments]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compiled(*given)
            torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / given[0].nbytes

    donated = peak(add.op.maybe_inplace, "inp")
    assert report().clones_inserted == report().clones_removed == 2 * LAYERS
    assert donated == 2
    assert peak(add.op, "inp") == 3
    assert peak(add.op, "native") > 2
