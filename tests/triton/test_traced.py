"""What a compiler sees of the kernels: launches, and not black boxes."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
BF16 = torch.bfloat16


class Tracer:
    """Fake tensors whose first dimension is symbolic, and traces over them."""

    def __init__(self) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment)

    def rows(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (len(shape) - 1))
        return self.mode.from_tensor(torch.empty(shape, dtype=dtype, device="meta"), symbolic_context=context)

    def fixed(self, *shape: int) -> torch.Tensor:
        return self.mode.from_tensor(torch.empty(shape, dtype=BF16, device="meta"), static_shapes=True)

    def launches(self, function: Callable[..., Any], *arguments: Any) -> list[torch.fx.Node]:
        from irframework.compiler.tracing import trace

        launch = torch.ops.higher_order.triton_kernel_wrapper_functional
        graph = trace(function, arguments, self.mode).module.graph
        return [node for node in graph.nodes if node.target is launch]

    def written(self, function: Callable[..., Any], *arguments: Any) -> list[str]:
        (node,) = self.launches(function, *arguments)
        return node.kwargs["tensors_to_clone"]


@pytest.fixture
def tracer(monkeypatch):
    import triton
    from irframework_triton_kernels.launch import call
    from triton.backends.compiler import GPUTarget

    # Triton asks its active driver for the target whose code it analyses; without a device there is none.
    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 80, 32),
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    cached = (call.abilities, call.multiprocessors, call.shared_memory)
    for function in cached:
        function.cache_clear()
    yield Tracer()
    for function in cached:
        function.cache_clear()


@pytest.fixture
def kernels():
    from irframework_triton_kernels import implementations

    return implementations


def test_every_implementation_is_one_visible_launch_that_writes_its_results_only(kernels, tracer):
    from irframework_triton_kernels import activations

    x, wide, weight = tracer.rows(8, 4096), tracer.rows(8, 8192), tracer.fixed(4096)
    assert tracer.written(lambda x, w: kernels.rms_norm(x, w, 1e-6), x, weight) == ["y"]
    add = tracer.written(lambda x, r, w: kernels.fused_add_rms_norm(x, r, w, 1e-6), x, tracer.rows(8, 4096), weight)
    assert add == ["y", "residual"]
    assert tracer.written(kernels.silu_and_mul, wide) == ["y"]
    assert tracer.written(lambda x: kernels.gelu_and_mul(x, "tanh"), wide) == ["y"]
    assert tracer.written(activations.quick_gelu, wide) == ["y"]
    assert tracer.written(activations.swigluoai_and_mul, wide) == ["y"]
    assert tracer.written(activations.xielu, wide, tracer.fixed(1), tracer.fixed(1)) == ["y"]
    positions, key, cache = tracer.rows(8, dtype=torch.int64), tracer.rows(8, 1024), tracer.fixed(64, 128)
    pair = tracer.written(lambda p, q, k, c: kernels.rotary_embedding(p, q, k, c, 128), positions, x, key, cache)
    assert pair == ["query_out", "key_out"]
    alone = tracer.written(lambda p, q, c: kernels.rotary_embedding(p, q, None, c, 128), positions, x, cache)
    assert alone == ["query_out"]


def test_what_quantises_is_one_visible_launch_that_writes_its_results_only(kernels, tracer):
    x, residual, weight, scale = tracer.rows(8, 4096), tracer.rows(8, 4096), tracer.fixed(4096), tracer.fixed(1)
    scale = scale.float()
    assert tracer.written(kernels.static_quant_fp8, x, scale) == ["y"]
    assert tracer.written(kernels.silu_and_mul_static_quant_fp8, x, scale) == ["y"]
    assert tracer.written(lambda x, w, s: kernels.rms_norm_static_quant_fp8(x, w, s, 1e-6), x, weight, scale) == ["y"]
    assert tracer.written(kernels.dynamic_quant_fp8, x) == ["y", "code_scale"]
    assert tracer.written(kernels.silu_and_mul_dynamic_quant_fp8, x) == ["y", "code_scale"]
    dynamic = tracer.written(lambda x, w: kernels.rms_norm_dynamic_quant_fp8(x, w, 1e-6), x, weight)
    assert dynamic == ["y", "code_scale"]
    function = kernels.fused_add_rms_norm_static_quant_fp8
    assert tracer.written(lambda *a: function(*a, 1e-6), x, residual, weight, scale) == ["y", "residual"]
    function = kernels.fused_add_rms_norm_dynamic_quant_fp8
    assert tracer.written(lambda *a: function(*a, 1e-6), x, residual, weight) == ["y", "residual", "code_scale"]


def test_further_implementations_write_their_results_only(kernels, tracer):
    from irframework_triton_kernels import gemma_norms, quantizations, routing

    x, weight = tracer.rows(8, 4096), tracer.fixed(4096)
    assert tracer.written(quantizations.dynamic_quant_int8, x) == ["y", "code_scale"]
    for major in (False, True):
        groups = tracer.written(lambda x, m=major: quantizations.group_quant_fp8(x, 128, m, True), x)
        assert groups == ["y", "code_scale"]
    largest, codes = tracer.launches(quantizations.tensor_quant_fp8, x)
    assert largest.kwargs["tensors_to_clone"] == ["most"]
    assert codes.kwargs["tensors_to_clone"] == ["y", "code_scale"]
    assert tracer.written(lambda x, w: gemma_norms.gemma_rms_norm(x, w, 1e-6), x, weight) == ["y"]
    assert tracer.written(lambda x: routing.fused_topk(x, 8), x) == ["weights", "ids"]
    assert tracer.written(lambda x, w: routing.grouped_topk(x, 8, 8, 4, True, "sigmoid", w), x, weight) == [
        "weights",
        "ids",
    ]
    function = gemma_norms.fused_add_gemma_rms_norm
    assert tracer.written(lambda x, w: function(x, x, w, 1e-6), x, weight) == ["y", "residual"]
    assert not tracer.environment.guards


def test_what_models_write_out_is_one_visible_launch_that_reads_its_arguments_where_they_are(tracer):
    from irframework_triton_kernels import written_out

    gate, up = tracer.rows(8, 4096), tracer.rows(8, 8192)[:, 4096:]
    assert tracer.written(written_out.silu_mul, gate, up) == ["y"]
    assert tracer.written(lambda gate, up: written_out.gelu_mul(gate, up, "tanh"), gate, up) == ["y"]
    joint = tracer.rows(2, 5, 48 * 64)
    heads = joint[..., : 32 * 64].unflatten(-1, (32, 64))
    for x in (heads, heads.transpose(1, 2).contiguous().transpose(1, 2)):
        for angles in (tracer.fixed(1, 5, 64), joint[..., :64]):
            assert tracer.written(written_out.apply_rotary_pos_emb, x, angles, angles) == ["y"]
    assert not tracer.environment.guards


def test_what_ends_in_codes_of_groups_is_one_visible_launch_that_writes_its_results_only(kernels, tracer):
    from irframework_triton_kernels import fused_quantizations as fused

    x, residual, weight, scale = tracer.rows(8, 4096), tracer.rows(8, 4096), tracer.fixed(4096), tracer.fixed(1)
    for layout in ((128, False, True), (64, True, False)):
        norm, add = fused.rms_norm_group_quant_fp8, fused.fused_add_rms_norm_group_quant_fp8
        written = tracer.written(lambda x, w, f=norm, more=layout: f(x, w, 1e-6, *more), x, weight)
        assert written == ["y", "code_scale"]
        written = tracer.written(lambda x, r, w, f=add, more=layout: f(x, r, w, 1e-6, *more), x, residual, weight)
        assert written == ["y", "residual", "code_scale"]
        for gate, more in ((fused.silu_and_mul_group_quant_fp8, ()), (fused.gelu_and_mul_group_quant_fp8, ("tanh",))):
            written = tracer.written(lambda x, f=gate, more=(*more, *layout): f(x, *more), x)
            assert written == ["y", "code_scale"]
    assert tracer.written(lambda x: fused.gelu_and_mul_dynamic_quant_fp8(x, "tanh"), x) == ["y", "code_scale"]
    assert tracer.written(fused.gelu_and_mul_static_quant_fp8, x, scale.float()) == ["y"]
    assert not tracer.environment.guards


def test_what_ends_in_nvfp4_is_one_visible_launch_that_writes_its_results_only(tracer):
    from irframework_triton_kernels import nvfp4

    x, residual, weight, scale = tracer.rows(8, 4096), tracer.rows(8, 4096), tracer.fixed(4096), tracer.fixed(1)
    scale, results = scale.float(), ["packed", "block_scale"]
    assert tracer.written(nvfp4.quant_nvfp4, x, scale) == results
    assert tracer.written(nvfp4.silu_and_mul_quant_nvfp4, x, scale) == results
    assert tracer.written(lambda x, w, s: nvfp4.rms_norm_quant_nvfp4(x, w, s, 1e-6), x, weight, scale) == results
    function = nvfp4.fused_add_rms_norm_quant_nvfp4
    written = tracer.written(lambda *args: function(*args, 1e-6), x, residual, weight, scale)
    assert written == ["packed", "residual", "block_scale"]
    assert not tracer.environment.guards


NVFP4 = tuple(f"{first}_quant_nvfp4" for first in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"))


@pytest.fixture
def nvfp4_anywhere():
    """The kernels that end in NVFP4, on the conditions of `triton`, by a provider that is also for the CPU."""
    from irframework_triton_kernels import nvfp4

    def add(fn, conditions, inplace=None):
        functional = fn if inplace else None
        decorate = getattr(ir.ops, fn.__name__).register_impl(
            "anywhere", supports_args=conditions, inplace=inplace is not None, functional=functional
        )
        decorate(inplace or fn)

    nvfp4.register(add)
    try:
        with ir.priority({name: "anywhere" if name in NVFP4 else "native" for name in ir.ops.__all__}):
            yield
    finally:
        for name in ("quant_nvfp4", *NVFP4):
            getattr(ir.ops, name).unregister_impl("anywhere")


@pytest.mark.usefixtures("nvfp4_anywhere")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, BF16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, torch.float64])
def test_norms_and_gates_in_front_of_nvfp4_become_launches_of_the_fused_kernels(tracer, dtype, weight_dtype):
    lowered = []

    def keep(graph, arguments):
        lowered.extend(ir.compiler.lower(graph, arguments, inference=True).graph.nodes)
        return make_boxed_func(lambda *_: wanted)  # no kernel runs here

    def step(x, residual, gate, weight, whole):
        y, total = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        return (
            *ir.ops.quant_nvfp4(ir.ops.rms_norm(x, weight, 1e-6), whole),
            *ir.ops.quant_nvfp4(y, whole),
            total,
            *ir.ops.quant_nvfp4(ir.ops.silu_and_mul(gate), whole),
        )

    torch._dynamo.reset()
    weight = None if weight_dtype is None else torch.ones(64, dtype=weight_dtype)
    rows = [torch.ones(2, 3, size, dtype=dtype) for size in (64, 64, 128)]
    with torch.no_grad():
        wanted = step(*rows, weight, torch.ones(1))
        backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
        torch.compile(step, backend=backend, fullgraph=True)(*rows, weight, torch.ones(1))
    launch = torch.ops.higher_order.triton_kernel_wrapper_functional
    names = [
        kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__ for node in lowered if node.target is launch
    ]
    taken = dtype != torch.float64  # which the kernels do not take
    assert ir.last_report().fusions == (dict.fromkeys(NVFP4, 1) if taken else {})
    assert sorted(names) == (["add_rms_norm_nvfp4_kernel", "nvfp4_kernel", "rms_norm_nvfp4_kernel"] if taken else [])


def test_attention_reads_its_caches_and_copies_none(kernels, tracer):
    from irframework_triton_kernels import decoding

    query, cache = tracer.rows(8, 32, 128), tracer.fixed(64, 16, 8, 128)
    offsets, lengths, table = (tracer.rows(*shape, dtype=torch.int32) for shape in ((9,), (8,), (8, 100)))

    def call(bound):
        return lambda q, c, o, n, t: decoding.attention(q, None, None, o, 1, n, bound, c, c, t, window=100)

    decode, add = tracer.launches(call(None), query, cache, offsets, lengths, table)
    assert decode.kwargs["tensors_to_clone"] == ["out", "largest", "total"]
    assert add.kwargs["tensors_to_clone"] == ["out"]
    (decode,) = tracer.launches(call(256), query, cache, offsets, lengths, table)
    assert decode.kwargs["tensors_to_clone"] == ["out"]


def test_latent_attention_reads_its_cache_and_copies_nothing(kernels, tracer):
    from irframework_triton_kernels import latent_decoding

    nope, rope, cache = tracer.rows(8, 16, 512), tracer.rows(8, 16, 64), tracer.fixed(64, 64, 576)
    offsets, lengths, table = (tracer.rows(*shape, dtype=torch.int32) for shape in ((9,), (8,), (8, 100)))

    def call(bound):
        def attend(q, r, c, o, n, t):
            return latent_decoding.mla_attention(q, r, None, o, 1, 0.1, None, None, n, bound, c, t)

        return attend

    decode, add = tracer.launches(call(None), nope, rope, cache, offsets, lengths, table)
    assert decode.kwargs["tensors_to_clone"] == ["out", "largest", "total"]
    assert add.kwargs["tensors_to_clone"] == ["out"]
    (decode,) = tracer.launches(call(256), nope, rope, cache, offsets, lengths, table)
    assert decode.kwargs["tensors_to_clone"] == ["out"]
    # That there are as many of everything as there are sequences; nothing of how many.
    assert not any(guard.expr.atoms(sympy.Integer, sympy.Max) - {-1} for guard in tracer.environment.guards)


@pytest.mark.parametrize(("heads", "tile"), [(16, (16, 4, 2)), (128, (64, 8, 1))])
def test_one_compile_of_latent_attention_shares_out_any_number_of_sequences(kernels, tracer, heads, tile):
    """The tile is that of many sequences; how many programs there are follows from how many sequences there are."""
    launch, compiles = torch.ops.higher_order.triton_kernel_wrapper_functional, []

    def keep(graph, arguments):
        node = next(node for node in graph.graph.nodes if node.target is launch)
        (config,) = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).configs
        compiles.append((node.kwargs["kwargs"]["tile_heads"], config.num_warps, config.num_stages))
        # No kernel runs here: memory for sums is returned, and its size says how many shares there are.
        graph.graph.output_node().args = ([node.kwargs["kwargs"]["out"]],)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return make_boxed_func(graph)

    kernels._launch()
    op = torch.ops.irframework_triton_kernels.decode_latent_attention.default
    backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: op(*given, 8192, 0.1, None), backend=backend, fullgraph=True)
    found = {}
    for tokens in (3, 2, 7, 40, 300):
        offsets, table = torch.arange(tokens + 1, dtype=torch.int32), torch.ones(tokens, 128, dtype=torch.int32)
        query, rope = (torch.ones(tokens, heads, size, dtype=BF16) for size in (512, 64))
        given = (query, rope, torch.ones(2, 64, 576, dtype=BF16), offsets, offsets[1:].clone(), table)
        for tensor in (query, rope, *given[3:]):
            torch._dynamo.mark_dynamic(tensor, 0)
        found[tokens] = compiled(*given).numel() / query.numel()
    wanted = 2 * 132 if heads == 16 else 132
    assert compiles == [tile]
    assert found == {n: max(1, min(32, wanted // (n * heads // tile[0]))) for n in (3, 2, 7, 40, 300)}


def test_the_in_place_op_writes_its_activations(kernels, tracer):
    kernels._launch()
    x, weight = tracer.rows(8, 4096), tracer.fixed(4096)
    op = torch.ops.irframework_triton_kernels.fused_add_rms_norm_.default

    def call(x, residual, weight):
        op(x, residual, weight, 1e-6, None)
        return x, residual

    assert tracer.written(call, x, tracer.rows(8, 4096), weight) == ["y", "residual"]


def test_a_trace_holds_for_every_number_of_rows(kernels, tracer):
    x, weight = tracer.rows(8, 4096), tracer.fixed(4096)
    assert tracer.launches(lambda x, w: kernels.rms_norm(x, w, 1e-6), x, weight)
    assert tracer.launches(lambda x, w: kernels.fused_add_rms_norm(x, x, w, 1e-6), x, weight)
    assert tracer.launches(kernels.silu_and_mul, x)
    assert tracer.launches(lambda x, w: kernels.rms_norm(x, w, 1e-6), tracer.rows(8, 2, 4096), weight)
    assert not tracer.environment.guards


def test_the_torch_ops_have_fake_results_of_the_right_shape_and_dtype(kernels, tracer):
    kernels._launch()
    ops, x = torch.ops.irframework_triton_kernels, tracer.rows(8, 4096)
    with tracer.mode:
        y = ops.rms_norm(x, tracer.fixed(4096), 1e-6, None)
        assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
        assert ops.gated(x, "silu").shape == (x.shape[0], 2048)


# In a process of its own, which may believe in a device for good.
LOWERED = """
import sys, torch, triton
from types import SimpleNamespace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

triton.runtime.driver._active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 80, 32))
torch.version.cuda = "13.0"
import irframework as ir
from irframework.compiler.clones import donate_op

ir.load_plugins()
given_away = donate_op() if "donated" in sys.argv else lambda tensor: tensor

def layer(x, residual, weight):
    x, residual = given_away(x), given_away(residual)
    y, residual = torch.ops.irframework.fused_add_rms_norm(x, residual, weight, 1e-6)
    return torch.ops.irframework.rms_norm(y, weight, 1e-6), residual

with FakeTensorMode():
    shapes = (8, 64), (8, 64), (64,)
    x, residual, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    module = make_fx(layer)(x, residual, weight)
    with ir.priority(fused_add_rms_norm="triton", rms_norm="triton"):
        module = ir.compiler.lower(module, [x, residual, weight], inference=True)
for node in module.graph.nodes:
    if node.op == "call_function":
        print(getattr(node.target, "__name__", node.target))
"""


@pytest.mark.parametrize("inputs", ["kept", "donated"])
def test_a_lowered_graph_holds_launches_into_fresh_memory_and_no_copies(inputs):
    """Also of what is donated: Inductor copies what a kernel that it sees overwrites of a graph's inputs."""
    done = subprocess.run([sys.executable, "-c", LOWERED, inputs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [name for name in done.stdout.split() if name != "getitem"]
    launch, empty = "triton_kernel_wrapper_functional", "empty.memory_format"
    assert calls == [empty, empty, launch, empty, launch]
