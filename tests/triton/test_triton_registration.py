"""What the plugin registers, and which calls it takes. No kernel runs here."""

import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import irframework as ir
from irframework.dispatch import why_never

OPS = (
    "rms_norm",
    "rms_norm_static_quant_fp8",
    "rms_norm_dynamic_quant_fp8",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "silu_and_mul",
    "silu_and_mul_static_quant_fp8",
    "silu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul",
    "static_quant_fp8",
    "dynamic_quant_fp8",
    "rotary_embedding",
    "reshape_and_cache",
    "rotary_embedding_reshape_and_cache",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu2",
    "xielu",
    "mul_and_silu",
    "swigluoai_and_mul",
    "fatrelu_and_mul",
    "tensor_quant_fp8",
    "group_quant_fp8",
    "dynamic_quant_int8",
    "gemma_rms_norm",
    "fused_add_gemma_rms_norm",
    "fused_topk",
    "grouped_topk",
    "attention",
    "mla_attention",
    "mla_attention_group_quant_fp8",
    "gelu_and_mul_static_quant_fp8",
    "gelu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul_group_quant_fp8",
    "silu_and_mul_group_quant_fp8",
    "rms_norm_group_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8",
    "quant_nvfp4",
    "rms_norm_quant_nvfp4",
    "fused_add_rms_norm_quant_nvfp4",
    "silu_and_mul_quant_nvfp4",
    "all_reduce_rms_norm",
    "all_reduce_fused_add_rms_norm",
    "all_reduce_fused_add_rms_norm_static_quant_fp8",
    "all_reduce_fused_add_rms_norm_dynamic_quant_fp8",
    "qk_norm_rotary_embedding",
    "qk_norm_rotary_embedding_reshape_and_cache",
    "silu_mul",
    "gelu_mul",
    "apply_rotary_pos_emb",
    "linear_silu_and_mul",
    "scaled_linear_silu_and_mul_static_quant_fp8",
)
# What the other tokens are changes a token's codes there, and how many there are the last bits of latent attention and
# of products; those of attention do not depend on them, but it says nothing.
DEPENDENT = ("tensor_quant_fp8", "attention", "mla_attention", "mla_attention_group_quant_fp8")
DEPENDENT += ("linear_silu_and_mul", "scaled_linear_silu_and_mul_static_quant_fp8")
DEPENDENT += tuple(name for name in OPS if name.startswith("all_reduce"))  # the backend adds up what is too large


@pytest.fixture
def impl():
    ir.load_plugins()
    return lambda name: getattr(ir.ops, name).impls["triton"]


def reason(answer: object) -> str:
    assert isinstance(answer, ir.Rejected), answer
    return answer.reason


def test_the_plugin_loads():
    (info,) = (plugin for plugin in ir.plugins() if plugin.name == "triton_kernels")
    assert (info.status, info.providers) == ("loaded", ("triton",))


@pytest.mark.parametrize("name", OPS)
def test_every_standard_op_has_a_batch_invariant_implementation_for_gpus(impl, name):
    assert impl(name).device_types == ("cuda", "xpu")
    assert impl(name).batch_invariant == (name not in DEPENDENT)


@pytest.mark.parametrize("name", OPS)
def test_what_adds_a_residual_works_in_place_and_functionally(impl, name):
    assert impl(name).inplace == (name.startswith("fused_add") or name.endswith("cache"))
    assert (impl(name).functional is not None) == name.startswith("fused_add")


def test_triton_is_not_imported_before_a_kernel_is_needed():
    text = (
        "import sys, irframework as ir; ir.load_plugins(); [ir.ops.rms_norm.supported_providers()]; "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_a_torch_for_the_cpu_is_the_reason_why_nothing_runs(monkeypatch):
    from irframework_triton_kernels.availability import triton_runs

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for kind in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, kind, None, raising=False)
    assert "built for the CPU only" in reason(triton_runs())


def test_a_missing_triton_is_the_reason_why_nothing_runs(monkeypatch):
    from irframework_triton_kernels.availability import triton_runs

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in reason(triton_runs())


def test_a_torch_with_a_device_and_triton_is_enough(monkeypatch):
    from irframework_triton_kernels.availability import triton_runs

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    assert triton_runs() is True


def test_the_kernels_are_preferred_on_cuda_and_rocm_only():
    import irframework_triton_kernels as plugin

    from irframework.platform import BUILT_IN

    chosen = {p.name: plugin.irframework_default_priorities(p, "eager") for p in BUILT_IN}
    assert chosen == {"cuda": {"*": ("triton",)}, "rocm": {"*": ("triton",)}, "xpu": None, "cpu": None}


X, W = torch.ones(2, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((X.double(), W), "x is float64"),
        ((X, W.double()), "weight is float64"),
        ((X, torch.ones(1, 8)), "weight has shape"),
        ((X, torch.ones(4)), "weight has shape"),
        ((X.t().contiguous().t(), W), "the last dimension of x must have stride 1"),
        ((torch.tensor(1.0), None), "the last dimension of x"),
        ((X, W, 1e-6, 0), "variance_size=0"),
        ((X, W, 1e-6, 9), "variance_size=9"),
    ],
)
def test_a_norm_of_something_else_is_refused_with_the_reason(impl, arguments, why):
    arguments = (*arguments, 1e-6)[: max(3, len(arguments))]
    assert why in reason(impl("rms_norm").supports_args(*arguments))


@pytest.mark.parametrize(
    ("x_residual", "why"), [(X.half(), "x_residual is float16"), (X[:1], "x_residual has shape"), (X.t()[:2], "shape")]
)
def test_a_residual_unlike_x_is_refused_with_the_reason(impl, x_residual, why):
    assert why in reason(impl("fused_add_rms_norm").supports_args(X, x_residual, W, 1e-6))


@pytest.mark.parametrize(
    ("x", "why"), [(X[:, :7], "multiple of 2"), (X.long(), "x is int64"), (torch.ones(8, 2).t(), "stride 1")]
)
def test_gating_something_else_is_refused_with_the_reason(impl, x, why):
    assert why in reason(impl("silu_and_mul").supports_args(x))


@pytest.mark.parametrize(
    ("scale", "why"), [(torch.ones(2), "scale has shape (2,)"), (torch.ones(1).double(), "scale is float64")]
)
def test_codes_under_something_else_than_one_number_are_refused_with_the_reason(impl, scale, why):
    calls = {
        "static_quant_fp8": (X, scale),
        "silu_and_mul_static_quant_fp8": (X, scale),
        "rms_norm_static_quant_fp8": (X, W, scale, 1e-6),
        "fused_add_rms_norm_static_quant_fp8": (X, X, W, scale, 1e-6),
    }
    for name, arguments in calls.items():
        assert why in reason(impl(name).supports_args(*arguments))


@pytest.mark.parametrize(("x", "why"), [(X.double(), "x is float64"), (torch.ones(8, 2).t(), "stride 1")])
def test_quantising_something_else_is_refused_with_the_reason(impl, x, why):
    for name in ("dynamic_quant_fp8", "dynamic_quant_int8", "tensor_quant_fp8"):
        assert why in reason(impl(name).supports_args(x))
    assert why in reason(impl("gemma_rms_norm").supports_args(x, torch.ones(x.shape[-1]), 1e-6))
    assert why in reason(impl("static_quant_fp8").supports_args(x, torch.ones(1)))
    assert why in reason(impl("rms_norm_dynamic_quant_fp8").supports_args(x, None, 1e-6))
    assert why in reason(impl("fused_add_rms_norm_dynamic_quant_fp8").supports_args(x, x, None, 1e-6))


def test_an_unknown_approximation_is_refused_with_the_reason(impl):
    assert "approximate is 'fast'" in reason(impl("gelu_and_mul").supports_args(X, "fast"))


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("gelu_new", (X.double(),), "x is float64"),
        ("relu2", (torch.ones(8, 2).t(),), "stride 1"),
        ("quick_gelu", (torch.tensor(1.0),), "the last dimension of x"),
        ("xielu", (X, torch.ones(2), torch.ones(1)), "alpha_p has shape (2,)"),
        ("xielu", (X, torch.ones(1), torch.ones(1).double()), "alpha_n is float64"),
        ("mul_and_silu", (X[:, :7],), "multiple of 2"),
        ("fatrelu_and_mul", (X[:, :7],), "multiple of 2"),
        ("swigluoai_and_mul", (X, 1.0, 0.0), "limit is 0.0"),
    ],
)
def test_activating_something_else_is_refused_with_the_reason(impl, name, arguments, why):
    assert why in reason(impl(name).supports_args(*arguments))


def test_a_row_that_fits_in_no_shared_memory_is_refused_and_one_of_symbolic_length_is_not(impl, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sums = importlib.import_module("irframework_triton_kernels.sums")
    monkeypatch.setattr(sums, "memory_of", lambda group: SimpleNamespace(capacity=4 * 8))
    takes = impl("all_reduce_rms_norm").supports_args
    assert takes(X, W, 1e-6, "0") is True
    assert "a row has 64 bytes" in reason(takes(torch.ones(2, 16), torch.ones(16), 1e-6, "0"))
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * 2)
    environment = ShapeEnv()
    x = FakeTensorMode(shape_env=environment).from_tensor(torch.ones(3, 16), symbolic_context=sizes)
    assert takes(x, None, 1e-6, "0") is True
    assert not environment.guards


HEADS, ANGLES = torch.ones(2, 3, 4, 8), torch.ones(1, 3, 8)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("silu_mul", (X.double(), X.double()), "gate is float64"),
        ("silu_mul", (X, X.half()), "up is float16"),
        ("silu_mul", (X, X[:1]), "needs the shape of gate"),
        ("gelu_mul", (X, torch.ones(8, 2).t()), "stride 1"),
        ("gelu_mul", (torch.tensor(1.0), torch.tensor(1.0)), "the last dimension of gate"),
        ("gelu_mul", (X, X, "fast"), "approximate is 'fast'"),
        ("apply_rotary_pos_emb", (HEADS.double(), ANGLES, ANGLES), "x is float64"),
        ("apply_rotary_pos_emb", (HEADS[0], ANGLES, ANGLES), "x has 3 dimensions"),
        ("apply_rotary_pos_emb", (HEADS, ANGLES[0], ANGLES[0]), "cos has 2 dimensions"),
        ("apply_rotary_pos_emb", (HEADS, ANGLES, ANGLES.half()), "sin is float16"),
        ("apply_rotary_pos_emb", (HEADS, ANGLES, ANGLES.expand(2, 3, 8)), "needs the shape of cos"),
        ("apply_rotary_pos_emb", (HEADS[..., :4], ANGLES, ANGLES), "cos has 8 elements for a head of 4"),
        ("apply_rotary_pos_emb", (HEADS[..., :7], ANGLES[..., :7], ANGLES[..., :7]), "an even number"),
        ("apply_rotary_pos_emb", (HEADS.transpose(2, 3).contiguous().transpose(2, 3), ANGLES, ANGLES), "stride 1"),
    ],
)
def test_what_models_write_out_otherwise_is_refused_with_the_reason(impl, name, arguments, why):
    assert why in reason(impl(name).supports_args(*arguments))


def test_heads_of_any_strides_and_angles_for_all_sequences_or_each_are_taken(impl):
    takes = impl("apply_rotary_pos_emb").supports_args
    assert takes(torch.ones(2, 4, 3, 8).transpose(1, 2), ANGLES, ANGLES) is True
    assert takes(torch.ones(2, 3, 96)[..., 32:64].unflatten(-1, (4, 8)), *(torch.ones(2, 3, 8).half(),) * 2) is True


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((X.double(), 4), "x is float64"),
        ((X, 3), "multiple of group_size=3"),
        ((X, 0), "group_size is 0"),
        ((torch.ones(1, 32768), 32768), "needs 1 to 16384"),
        ((X[0], 4, True), "column-major scales need 2"),
    ],
)
def test_groups_of_something_else_are_refused_with_the_reason(impl, arguments, why):
    assert why in reason(impl("group_quant_fp8").supports_args(*arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("silu_and_mul_group_quant_fp8", (X, 8), "multiple of group_size=8"),
        ("silu_and_mul_group_quant_fp8", (X[:, :7], 1), "multiple of 2"),
        ("gelu_and_mul_group_quant_fp8", (X, "none", 3), "multiple of group_size=3"),
        ("gelu_and_mul_group_quant_fp8", (X, "fast", 4), "approximate is 'fast'"),
        ("gelu_and_mul_group_quant_fp8", (X[0], "none", 4, True), "column-major scales need 2"),
        ("gelu_and_mul_static_quant_fp8", (X, torch.ones(2)), "scale has shape (2,)"),
        ("gelu_and_mul_static_quant_fp8", (X, torch.ones(1), "fast"), "approximate is 'fast'"),
        ("gelu_and_mul_dynamic_quant_fp8", (X.double(),), "x is float64"),
        ("rms_norm_group_quant_fp8", (X, W.double(), 1e-6, 4), "weight is float64"),
        ("rms_norm_group_quant_fp8", (X, W, 1e-6, 3), "group_size is 3, needs a power of two"),
        ("rms_norm_group_quant_fp8", (X, W, 1e-6, 16), "multiple of group_size=16"),
        ("rms_norm_group_quant_fp8", (torch.ones(1, 16384), None, 1e-6, 16384), "of at most 8192"),
        ("rms_norm_group_quant_fp8", (X[0], W, 1e-6, 4, True), "column-major scales need 2"),
        ("fused_add_rms_norm_group_quant_fp8", (X, X.half(), W, 1e-6, 4), "x_residual is float16"),
        ("fused_add_rms_norm_group_quant_fp8", (X, X, W, 1e-6, 0), "group_size is 0"),
    ],
)
def test_fusing_something_else_with_a_quantisation_is_refused_with_the_reason(impl, name, arguments, why):
    assert why in reason(impl(name).supports_args(*arguments))


ROWS, ONE = torch.ones(2, 32), torch.ones(1)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("quant_nvfp4", (ROWS.double(), ONE), "x is float64"),
        ("quant_nvfp4", (X, ONE), "multiple of 16"),
        ("quant_nvfp4", (torch.tensor(1.0), ONE), "the last dimension of x"),
        ("quant_nvfp4", (torch.ones(32, 16).t(), ONE), "stride 1"),
        ("quant_nvfp4", (ROWS, torch.ones(2)), "global_scale has shape (2,)"),
        ("quant_nvfp4", (ROWS, ONE.double()), "global_scale is float64"),
        ("silu_and_mul_quant_nvfp4", (torch.ones(2, 48), ONE), "multiple of 32"),
        ("silu_and_mul_quant_nvfp4", (ROWS, ONE.half()), "global_scale is float16"),
        ("rms_norm_quant_nvfp4", (X, W, ONE, 1e-6), "multiple of 16"),
        ("rms_norm_quant_nvfp4", (ROWS, W, ONE, 1e-6), "weight has shape"),
        ("rms_norm_quant_nvfp4", (ROWS, torch.ones(32).double(), ONE, 1e-6), "weight is float64"),
        ("rms_norm_quant_nvfp4", (ROWS, None, torch.ones(2), 1e-6), "global_scale has shape (2,)"),
        ("fused_add_rms_norm_quant_nvfp4", (ROWS, ROWS.half(), None, ONE, 1e-6), "x_residual is float16"),
        ("fused_add_rms_norm_quant_nvfp4", (ROWS, ROWS[:1], None, ONE, 1e-6), "needs the shape of x"),
        ("fused_add_rms_norm_quant_nvfp4", (X, X, None, ONE, 1e-6), "multiple of 16"),
    ],
)
def test_making_nvfp4_of_something_else_is_refused_with_the_reason(impl, name, arguments, why):
    assert why in reason(impl(name).supports_args(*arguments))


def test_rows_of_whole_blocks_become_nvfp4(impl):
    for x in (ROWS, ROWS.bfloat16(), torch.ones(16), torch.ones(3, 64)[:, 7:39], torch.ones(0, 48), torch.ones(3, 0)):
        for scale in (ONE, torch.tensor(0.1), torch.ones(1, 1)):
            assert impl("quant_nvfp4").supports_args(x, scale) is True
            assert impl("rms_norm_quant_nvfp4").supports_args(x, None, scale, 1e-6) is True
            assert impl("fused_add_rms_norm_quant_nvfp4").supports_args(x, x, None, scale, 1e-6) is True
            assert impl("silu_and_mul_quant_nvfp4").supports_args(torch.cat((x, x), -1), scale) is True


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("fused_topk", (X.double(), 2), "router_logits is float64"),
        ("fused_topk", (X, 9), "top_k is 9"),
        ("fused_topk", (X, 0), "top_k is 0"),
        ("fused_topk", (X, 2, True, "relu"), "scoring is 'relu'"),
        ("fused_topk", (torch.ones(1, 5000), 2), "5000 experts"),
        ("grouped_topk", (X, 2, 3, 1), "num_groups is 3"),
        ("grouped_topk", (X, 2, 4, 5), "top_groups is 5"),
        ("grouped_topk", (X, 3, 4, 1), "top_groups is 1"),
        ("grouped_topk", (torch.ones(1, 3900), 2, 1300, 2), "8192 when padded"),
        ("grouped_topk", (X, 2, 4, 2, True, "softmax", torch.ones(4)), "correction_bias has shape"),
        ("grouped_topk", (X, 2, 4, 2, True, "softmax", W.double()), "correction_bias is float64"),
    ],
)
def test_choosing_something_else_is_refused_with_the_reason(impl, name, arguments, why):
    assert why in reason(impl(name).supports_args(*arguments))


PAGED = torch.ones(5, 16, 2, 8)
TABLE, LENGTHS, OFFSETS = (torch.ones(shape, dtype=torch.int32) for shape in ((3, 2), 3, 4))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"query": torch.ones(3, 4, 8).double()}, "query is float64"),
        ({"query": torch.ones(3, 3, 8)}, "3 heads of queries do not fit"),
        ({"query": torch.ones(3, 4, 6)}, "key_cache has shape"),
        ({"key_cache": None, "value_cache": None, "key": X, "value": X}, "not in a paged cache"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2"),
        ({"value_cache": PAGED.half()}, "value_cache is float16"),
        ({"value_cache": torch.ones(5, 16, 2, 300)}, "value_cache has heads of 300"),
        ({"key_cache": torch.ones(5, 8, 2, 16).transpose(1, 3)}, "stride 1"),
        ({"block_table": TABLE.long()}, "block_table is int64"),
        ({"sinks": torch.ones(3)}, "sinks has shape (3,)"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
    ],
)
def test_attending_to_something_else_is_refused_with_the_reason(impl, change, why):
    given = {
        "query": torch.ones(3, 4, 8), "key": None, "value": None, "cu_seqlens_q": OFFSETS, "max_seqlen_q": 1,
        "seq_lens": LENGTHS, "key_cache": PAGED, "value_cache": PAGED, "block_table": TABLE, "window": 7,
        "soft_cap": 30.0, "sinks": torch.ones(4),
    }  # fmt: skip
    assert impl("attention").supports_args(**given) is True
    assert why in reason(impl("attention").supports_args(**{**given, **change}))


LATENT = torch.ones(5, 16, 10)


@pytest.mark.parametrize("name", ["mla_attention", "mla_attention_group_quant_fp8"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"query_nope": torch.ones(3, 4, 6).double()}, "query_nope is float64"),
        ({"query_rope": torch.ones(3, 4, 2).half()}, "query_rope is float16"),
        ({"latent_cache": LATENT.half()}, "latent_cache is float16"),
        ({"latent_cache": torch.ones(5, 10, 16).transpose(1, 2)}, "stride 1"),
        ({"latent_cache": None}, "not in a paged cache"),
        ({"latent": torch.ones(3, 10)}, "given twice"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2"),
        ({"query_rope": torch.ones(3, 3, 2)}, "query_rope has 3 heads, query_nope has 4"),
        ({"query_rope": torch.ones(3, 4, 0)}, "rows of 10 and 0 elements"),
        ({"latent_cache": torch.ones(5, 16, 600)}, "rows of 598 and 2 elements, needs 1 to 512"),
        ({"latent_cache": LATENT[:, :0]}, "blocks of no rows"),
        ({"key_up": None}, "query_nope has 6 elements, which do not become the 8"),
        ({"key_up": torch.ones(4, 5, 8)}, "query_nope has 6 elements, which do not become the 8"),
        ({"value_up": torch.ones(4, 7, 5)}, "value_up has shape (4, 7, 5)"),
        ({"block_table": TABLE.long()}, "block_table is int64"),
    ],
)
def test_attending_to_other_latent_rows_is_refused_with_the_reason(impl, name, change, why):
    given = {
        "query_nope": torch.ones(3, 4, 6), "query_rope": torch.ones(3, 4, 2), "latent": None, "cu_seqlens_q": OFFSETS,
        "max_seqlen_q": 1, "scale": 0.3, "key_up": torch.ones(4, 6, 8), "value_up": torch.ones(4, 8, 5),
        "seq_lens": LENGTHS, "latent_cache": LATENT, "block_table": TABLE,
    }  # fmt: skip
    given |= {"group_size": 5} if "group" in name else {}
    assert impl(name).supports_args(**given) is True
    assert why in reason(impl(name).supports_args(**{**given, **change}))
    if "group" in name:
        assert "multiple of group_size=3" in reason(impl(name).supports_args(**{**given, "group_size": 3}))


P, CACHE = torch.tensor([0, 1]), torch.ones(4, 4)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((P, X, None, torch.ones(4, 3), 4), "rotates 3 elements"),
        ((P, X, None, torch.ones(4, 6), 4), "rotates 6 elements"),
        ((P, X, None, CACHE, 3), "rotates 4 elements"),
        ((P, X, None, CACHE, 5), "last dimension of 8"),
        ((P, X, torch.ones(2, 2, 2), CACHE, 4), "key has a last dimension of 2"),
        ((P, torch.ones(2, 2, 2, 4), None, CACHE, 4), "query has 4 dimensions"),
        ((P, X, torch.ones(8), CACHE, 4), "key has 1 dimensions"),
        ((P.short(), X, None, CACHE, 4), "positions is int16"),
        ((P, X, X.double(), CACHE, 4), "key is float64"),
        ((P, X, None, CACHE[0], 4), "cos_sin_cache has 1 dimensions"),
    ],
)
def test_rotating_something_else_is_refused_with_the_reason(impl, arguments, why):
    assert why in reason(impl("rotary_embedding").supports_args(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        (X, W, 1e-6),
        (X.half(), None, 1e-6, 4),
        (X.bfloat16(), W, 1e-6),
        (torch.ones(3, 16)[:, 4:12], W, 1e-6),
        (torch.ones(2, 0, 8), W, 1e-6),
    ],
)
def test_a_norm_of_rows_is_taken(impl, arguments):
    assert impl("rms_norm").supports_args(*arguments) is True


K, CACHE4 = torch.ones(3, 2, 4), torch.ones(2, 8, 2, 4)
SLOTS = torch.tensor([0, 5, -1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"key": K.double()}, "key is float64"),
        ({"value": K.half()}, "value_cache is torch.float32, value is torch.float16"),
        ({"key": K[:, :1]}, "key has shape (3, 1, 4), does not fit a cache of shape (2, 8, 2, 4)"),
        ({"value": K.flatten(1)[:, :6]}, "value has shape (3, 6)"),
        ({"key": K.transpose(1, 2)}, "the last dimension of key must have stride 1"),
        ({"value_cache": CACHE4.view(4, 4, 2, 4)}, "blocks of different sizes"),
        ({"key_cache": CACHE4[0]}, "key_cache has 3 dimensions"),
        ({"slot_mapping": SLOTS.short()}, "slot_mapping is int16"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int32)[::2]}, "slot_mapping must be contiguous"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_cache_of_something_else_is_refused_with_the_reason(impl, change, why, fused):
    given = {"key": K, "value": K, "key_cache": CACHE4, "value_cache": CACHE4, "slot_mapping": SLOTS}
    assert impl("reshape_and_cache").supports_args(**given) is True
    if not fused:
        assert why in reason(impl("reshape_and_cache").supports_args(**{**given, **change}))
        return
    more = {"positions": SLOTS, "query": K, "cos_sin_cache": torch.ones(4, 4), "head_size": 4}
    implementation = impl("rotary_embedding_reshape_and_cache")
    assert implementation.supports_args(**more, **given) is True
    assert why in reason(implementation.supports_args(**more, **{**given, **change}))
    more |= {"query_weight": None, "key_weight": torch.ones(4), "epsilon": 1e-5}
    implementation = impl("qk_norm_rotary_embedding_reshape_and_cache")
    assert implementation.supports_args(**more, **given) is True
    assert why in reason(implementation.supports_args(**more, **{**given, **change}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"query_weight": torch.ones(3)}, "query_weight has shape (3,), needs one scale for each of 4 elements"),
        ({"key_weight": torch.ones(4, dtype=torch.float64)}, "key_weight is float64"),
        ({"key": None}, "key_weight is given without a key"),
        ({"query": torch.ones(3, 2, 3)}, "query has a last dimension of 3, does not fit head_size=4"),
    ],
)
def test_norms_of_heads_that_do_not_fit_are_refused_with_the_reason(impl, change, why):
    given = {"positions": SLOTS, "query": K, "key": K, "query_weight": torch.ones(4), "key_weight": torch.ones(4)}
    given |= {"cos_sin_cache": torch.ones(4, 4), "head_size": 4, "epsilon": 1e-5}
    implementation = impl("qk_norm_rotary_embedding")
    assert implementation.supports_args(**given) is True
    assert why in reason(implementation.supports_args(**{**given, **change}))


ROW, MATRIX = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((ROW.float(), MATRIX.float()), "x is float32"),
        ((ROW, MATRIX.half()), "weight is float16, needs the dtype of x"),
        ((ROW, MATRIX, MATRIX[:, 0]), "bias must be None"),
        ((ROW, MATRIX[:, :16]), r"weight has shape \(64, 16\), does not fit rows of 32"),
        ((ROW, MATRIX[:63]), "weight has 63 rows"),
        ((ROW, MATRIX[0]), "weight has 1 dimension"),
        ((ROW[0, 0], MATRIX), "last dimension of x"),
        ((ROW, MATRIX.t().contiguous().t()), "stride 1"),
    ],
)
def test_a_product_of_something_else_is_refused_with_the_reason(impl, arguments, why):
    op = ir.ops.linear_silu_and_mul
    assert re.search(why, reason(impl(op.name).accepts(op.bind(arguments))))


@pytest.mark.parametrize(
    "arguments", [(ROW, MATRIX), (ROW[:0], MATRIX), (ROW[0], MATRIX), (ROW[:, 1:31], MATRIX[:, :30])]
)
def test_a_product_of_rows_is_taken(impl, arguments):
    op = ir.ops.linear_silu_and_mul
    assert impl(op.name).accepts(op.bind(arguments)) is True


CODE, WEIGHTS, ONE = ROW.to(torch.float8_e4m3fn), MATRIX.to(torch.float8_e4m3fn), torch.ones(1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": ROW}, "x is bfloat16"),
        ({"x_scale": torch.ones(3, 1), "weight_scale": torch.ones(1, 64)}, "one element"),
        ({"scale": ONE.double()}, "scale is float64"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"fast_accumulation": False}, "fast_accumulation is False"),
        ({"weight": WEIGHTS[:48]}, "multiple of 32 rows of 16"),
        ({"x": CODE[:, :24], "weight": WEIGHTS[:, :24]}, "multiple of 32 rows of 16"),
        ({"x": CODE[:, :16]}, "does not fit rows of 16"),
    ],
)
def test_a_product_of_other_codes_is_refused_with_the_reason(impl, change, why):
    given = {"x": CODE, "weight": WEIGHTS, "x_scale": ONE, "weight_scale": ONE, "scale": ONE} | change
    op = ir.ops.scaled_linear_silu_and_mul_static_quant_fp8
    assert why in reason(impl(op.name).accepts(op.bind((), given)))
    assert impl(op.name).accepts(op.bind((CODE, WEIGHTS, ONE, ONE, ONE))) is True


@pytest.mark.parametrize("name", ["linear_silu_and_mul", "scaled_linear_silu_and_mul_static_quant_fp8"])
def test_products_look_at_no_symbolic_size(impl, name):
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dtype = torch.bfloat16 if name == "linear_silu_and_mul" else torch.float8_e4m3fn
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    x, weight = (
        mode.from_tensor(torch.empty(size, dtype=dtype, device="meta"), symbolic_context=sizes)
        for size in ((5, 48), (64, 48))
    )
    scales = () if name == "linear_silu_and_mul" else (mode.from_tensor(torch.empty(1, device="meta")),) * 3
    op = getattr(ir.ops, name)
    assert "symbolic" in reason(impl(name).accepts(op.bind((x, weight, *scales))))
    assert not environment.guards


def test_who_asks_for_another_device_does_not_begin_cuda(monkeypatch, impl):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("asked CUDA"))
    asked = impl("scaled_linear_silu_and_mul_static_quant_fp8")
    assert "cpu" in why_never(asked, "cpu")
    assert "no Intel GPU" in why_never(asked, "xpu")


@pytest.mark.parametrize(
    ("capability", "why"), [((8, 9), None), ((9, 0), None), ((8, 0), "cuda:0 has compute capability 8.0")]
)
def test_products_of_codes_need_a_device_that_reads_codes(monkeypatch, capability, why):
    from irframework_triton_kernels import availability

    monkeypatch.setattr(availability, "triton_runs", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    answer = availability.fp8_products_run()
    assert answer is True if why is None else why in reason(answer)
