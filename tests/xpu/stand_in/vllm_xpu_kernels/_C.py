"""Registers the ops when it is imported, as the real library does when it is loaded. Rejects what kernels misread."""
# ruff: noqa: N999 - the real one is called so

import os

import torch
import torch.nn.functional as F

from vllm_xpu_kernels.record import CALLS, SCHEMAS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
library = torch.library.Library("_C", "DEF")


def check(name, *tensors, contiguous=()):
    CALLS.append(name)
    for tensor in tensors:
        if tensor.dtype not in FLOATS or tensor.dtype != tensors[0].dtype:
            raise RuntimeError(f"{name}: dtypes {[t.dtype for t in tensors]}")
        if tensor.numel() == 0 or tensor.stride(-1) != 1:
            raise RuntimeError(f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise RuntimeError(f"{name}: strides {[t.stride() for t in contiguous]}")


def norm(x, weight, epsilon):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    return h.to(x.dtype) * weight


def rms_norm(result, input, weight, epsilon):
    check("rms_norm", result, input, weight, contiguous=(result, weight))
    if input.dim() not in (2, 3, 4) or result.shape != input.shape or weight.shape != input.shape[-1:]:
        raise RuntimeError(f"rms_norm: shapes {tuple(result.shape)}, {tuple(input.shape)}, {tuple(weight.shape)}")
    result.copy_(norm(input, weight, epsilon))


def fused_add_rms_norm(input, residual, weight, epsilon):
    check("fused_add_rms_norm", input, residual, weight, contiguous=(input, residual, weight))
    if input.dim() < 2 or residual.shape != input.shape or weight.shape != input.shape[-1:]:
        raise RuntimeError(f"fused_add_rms_norm: shapes {tuple(input.shape)}, {tuple(residual.shape)}")
    residual.add_(input)
    input.copy_(norm(residual, weight, epsilon))


def gated(name, activation):
    def op(out, input):
        check(name, out, input, contiguous=(out, input))
        gate, up = input.chunk(2, -1)
        if out.shape != gate.shape:
            raise RuntimeError(f"{name}: shapes {tuple(out.shape)}, {tuple(input.shape)}")
        out.copy_(activation(gate) * up)

    return op


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    given = [query] if key is None else [query, key]
    check("rotary_embedding", *given, cos_sin_cache, contiguous=(positions, *given, cos_sin_cache))
    if positions.dtype != torch.int64 or positions.dim() not in (1, 2):
        raise RuntimeError(f"rotary_embedding: positions {positions.dtype}, {tuple(positions.shape)}")
    heads = [x.numel() // positions.numel() // head_size for x in given]
    if heads[0] % heads[-1] or any(x.shape[: positions.dim()] != positions.shape for x in given):
        raise RuntimeError(f"rotary_embedding: shapes {[tuple(x.shape) for x in given]}")
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, -1)
    for x, count in zip(given, heads, strict=True):
        rows = x.view(positions.numel(), count, head_size)
        a, b = (rows[..., :half], rows[..., half : 2 * half]) if is_neox else (
            rows[..., : 2 * half : 2], rows[..., 1 : 2 * half : 2])  # fmt: skip
        turned = a * cos - b * sin, b * cos + a * sin
        a.copy_(turned[0])
        b.copy_(turned[1])


FP8 = torch.float8_e4m3fn


def check_codes(name, result, x, columns, scale=None):
    check(name, x, contiguous=(x, result))
    if result.dtype != FP8 or result.shape != (*x.shape[:-1], columns) or x.data_ptr() % 16 or x.dim() < 2:
        raise RuntimeError(f"{name}: {result.dtype} {tuple(result.shape)} from {tuple(x.shape)}, {x.data_ptr()}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise RuntimeError(f"{name}: scale {scale.dtype} {tuple(scale.shape)}")


def codes(h, scale):
    """A NaN is lost: a minimum with it is the other number."""
    return torch.fmax(torch.tensor(-448.0), torch.fmin(h.float() * (1 / scale), torch.tensor(448.0))).to(FP8)


def static_scaled_fp8_quant(result, input, scale, group_shape=None):
    check_codes("static_scaled_fp8_quant", result, input, input.shape[-1], scale)
    result.copy_(codes(input, scale))


def dynamic_per_token_scaled_fp8_quant(result, input, scale, scale_ub):
    check_codes("dynamic_per_token_scaled_fp8_quant", result, input, input.shape[-1])
    if scale.dtype != torch.float32 or scale.shape != (*input.shape[:-1], 1) or scale_ub is not None:
        raise RuntimeError(f"dynamic_per_token_scaled_fp8_quant: scale {scale.dtype} {tuple(scale.shape)}")
    largest = input.float().abs().nan_to_num(0.0, torch.inf).amax(-1, keepdim=True)
    scale.copy_((largest / 448).clamp_min(1 / (448 * 512)))
    result.copy_(codes(input, scale))


def rms_norm_static_fp8_quant(result, input, weight, scale, epsilon):
    check_codes("rms_norm_static_fp8_quant", result, input, input.shape[-1], scale)
    if weight.dtype != input.dtype or weight.shape != input.shape[-1:] or not weight.is_contiguous():
        raise RuntimeError(f"rms_norm_static_fp8_quant: weight {weight.dtype} {tuple(weight.shape)}")
    result.copy_(codes(norm(input, weight, epsilon), scale))


def fused_add_rms_norm_static_fp8_quant(result, input, residual, weight, scale, epsilon):
    check_codes("fused_add_rms_norm_static_fp8_quant", result, input, input.shape[-1], scale)
    if weight.dtype != input.dtype or residual.dtype != input.dtype or residual.shape != input.shape:
        raise RuntimeError(f"fused_add_rms_norm_static_fp8_quant: {weight.dtype}, {residual.dtype}")
    if not residual.is_contiguous() or residual.data_ptr() % 16:
        raise RuntimeError(f"fused_add_rms_norm_static_fp8_quant: residual {residual.stride()}")
    residual.add_(input)
    result.copy_(codes(norm(residual, weight, epsilon), scale))


def silu_and_mul_quant(result, input, scale):
    check_codes("silu_and_mul_quant", result, input, input.shape[-1] // 2, scale)
    gate, up = input.chunk(2, -1)
    result.copy_(codes(F.silu(gate) * up, scale))


IMPLS = {
    "static_scaled_fp8_quant": static_scaled_fp8_quant,
    "dynamic_per_token_scaled_fp8_quant": dynamic_per_token_scaled_fp8_quant,
    "rms_norm_static_fp8_quant": rms_norm_static_fp8_quant,
    "fused_add_rms_norm_static_fp8_quant": fused_add_rms_norm_static_fp8_quant,
    "silu_and_mul_quant": silu_and_mul_quant,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": gated("silu_and_mul", F.silu),
    "gelu_and_mul": gated("gelu_and_mul", F.gelu),
    "gelu_tanh_and_mul": gated("gelu_tanh_and_mul", lambda gate: F.gelu(gate, approximate="tanh")),
    "rotary_embedding": rotary_embedding,
}
LEFT_OUT = os.environ.get("STAND_IN_LEAVES_OUT")
CHANGED = os.environ.get("STAND_IN_CHANGES")
for schema in SCHEMAS:
    op_name = schema.partition("(")[0]
    if op_name == LEFT_OUT:
        continue
    library.define(schema.replace("float epsilon", "float eps") if op_name == CHANGED else schema)
    library.impl(op_name, IMPLS[op_name], "CPU")
