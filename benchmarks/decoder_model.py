"""The decoder that `decoder_layer.py` measures: sizes, weights, the layer over a set of ops, and its floor.

Nothing is copied that need not be: q, k and v are parts of one product and are given to kernels as rows with a stride;
keys and values are written to their places in the cache, which attention reads as it lies; a prompt's attention reads
its own keys and values. Plain torch writes to the cache in place, as rows of slots; the IR op is given the same memory
in blocks, and gives it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from decoder_ops import FP8, Ops, scaled_product
from torch import Tensor

import irframework as ir

EPSILON = 1e-5
BLOCK = 16  # slots of the cache


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    key_heads: int = 8
    head: int = 128
    layers: int = 8
    context: int = 1024

    @property
    def query(self) -> int:
        return self.heads * self.head

    @property
    def key(self) -> int:
        return self.key_heads * self.head


TINY = Shape(hidden=256, intermediate=512, heads=4, key_heads=2, head=64, layers=2, context=32)


@dataclass(frozen=True)
class Case:
    """What is run: `tokens` tokens, each the last of a sequence of its own (decode), or one prompt (prefill)."""

    name: str
    tokens: int
    decode: bool


CASES = (
    Case("decode1", 1, True),
    Case("decode64", 64, True),
    Case("prefill2048", 2048, False),
    Case("prefill8192", 8192, False),
)
KINDS = ("bf16", "fp8", "fp8_dynamic")


# --- weights and state -----------------------------------------------------------------------------------------------


class Linear(NamedTuple):
    """A matrix, [out, in], and in fp8 the scales of its rows and of what it is multiplied with."""

    weight: Tensor
    scale: Tensor | None
    input_scale: Tensor | None


class Layer(NamedTuple):
    """One layer's weights, and its part of the cache, [slots, key], or in blocks of slots (`in_blocks`)."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    keys: Tensor
    values: Tensor


def in_blocks(layer: Layer, shape: Shape) -> Layer:
    """The layer with the same cache as [blocks, BLOCK, key heads, head]."""
    keys, values = (t.view(-1, BLOCK, shape.key_heads, shape.head) for t in (layer.keys, layer.values))
    return layer._replace(keys=keys, values=values)


class Step(NamedTuple):
    """What the layers share."""

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor


@dataclass(frozen=True)
class Model:
    """A case's weights, state and input."""

    shape: Shape
    case: Case
    kind: str
    layers: tuple[Layer, ...]
    step: Step
    x: Tensor
    residual: Tensor


def make_linear(rows: int, columns: int, kind: str, device: str) -> Linear:
    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5
    if kind == "bf16":
        return Linear(weight, None, None)
    by_row = kind == "fp8_dynamic"
    largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().amax().reshape(1)
    scale = (largest.float() / 448).clamp_min(1e-12)
    codes = (weight.float() / scale).to(FP8)
    # What is multiplied with it is about normal in size: a scale of 1/32 takes values to 14.
    return Linear(codes, scale.t() if by_row else scale, None if by_row else torch.full((1,), 1 / 32, device=device))


def make_model(shape: Shape, case: Case, kind: str, device: str) -> Model:
    torch.manual_seed(0)
    linear = partial(make_linear, kind=kind, device=device)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    slots = case.tokens * shape.context if case.decode else case.tokens
    layers = tuple(
        Layer(
            1 + 0.1 * normal(shape.hidden),
            linear(shape.query + 2 * shape.key, shape.hidden),
            linear(shape.hidden, shape.query),
            1 + 0.1 * normal(shape.hidden),
            linear(2 * shape.intermediate, shape.hidden),
            linear(shape.hidden, shape.intermediate),
            normal(slots, shape.key),
            normal(slots, shape.key),
        )
        for _ in range(shape.layers)
    )
    token = torch.arange(case.tokens, device=device)
    positions = torch.full_like(token, shape.context - 1) if case.decode else token
    angles = torch.outer(
        torch.arange(max(shape.context, case.tokens), device=device).float(),
        500000.0 ** -(torch.arange(0, shape.head, 2, device=device) / shape.head),
    )
    step = Step(
        positions,
        token * shape.context + positions if case.decode else token,
        torch.cat((angles.cos(), angles.sin()), -1).to(torch.bfloat16),
    )
    return Model(shape, case, kind, layers, step, normal(case.tokens, shape.hidden), normal(case.tokens, shape.hidden))


# --- the model -------------------------------------------------------------------------------------------------------

Quantised = tuple[Tensor, Tensor | None]


def product(x: Quantised, linear: Linear) -> Tensor:
    """x [tokens, in] times the matrix, in bfloat16."""
    values, scale = x
    if linear.scale is None or scale is None:
        return F.linear(values, linear.weight)
    return scaled_product(values, linear.weight, scale, linear.scale)


def attend(query: Tensor, keys: Tensor, values: Tensor, shape: Shape, case: Case) -> Tensor:
    """Attention of a case over keys and values, [slots, key]; a token attends to its whole sequence, or to its past.

    Args:
        query: [tokens, query].
        keys: The cache (decode), or the prompt's own (prefill); rows may have a stride.
        values: The same.
        shape: Of the model.
        case: The case.

    Returns:
        [tokens, query].
    """
    sequences = case.tokens if case.decode else 1
    q, k, v = (
        t.unflatten(0, (sequences, -1)).unflatten(-1, (-1, shape.head)).transpose(1, 2) for t in (query, keys, values)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=not case.decode, enable_gqa=True)
    return y.transpose(1, 2).reshape(case.tokens, shape.query)


def make_layer(shape: Shape, case: Case, kind: str, ops: Ops) -> Callable[..., tuple[Tensor, ...]]:
    """The layer as a function of (x, residual, weights, step); it returns the next two, and its cache."""

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, after: Linear) -> tuple[Quantised, Tensor]:
        if kind == "fp8":
            q, residual = ops.add_norm_static(x, residual, weight, after.input_scale, EPSILON)
            return (q, after.input_scale), residual
        if kind == "fp8_dynamic":
            q, scale, residual = ops.add_norm_dynamic(x, residual, weight, EPSILON)
            return (q, scale), residual
        y, residual = ops.add_norm(x, residual, weight, EPSILON)
        return (y, None), residual

    def quantised(x: Tensor, after: Linear) -> Quantised:
        if kind == "fp8":
            return ops.quant_static(x, after.input_scale), after.input_scale
        if kind == "fp8_dynamic":
            q, scale = ops.quant_dynamic(x)
            return q, scale
        return x, None

    def gated_product(x: Quantised, linear: Linear, after: Linear) -> Quantised:
        values, scale = x
        if kind == "bf16":
            return ops.product_silu(values, linear.weight), None
        scaled = (values, linear.weight, scale, linear.scale)
        if kind == "fp8":
            return ops.product_silu_static(*scaled, after.input_scale), after.input_scale
        q, found = ops.product_silu_dynamic(*scaled)
        return q, found

    def layer(x: Tensor, residual: Tensor, weights: Layer, step: Step) -> tuple[Tensor, ...]:
        normed, residual = add_norm(x, residual, weights.attention_norm, weights.qkv)
        query, key, value = product(normed, weights.qkv).split((shape.query, shape.key, shape.key), -1)
        query, key, keys, values = ops.rotary_and_cache(
            step.positions, query, key, value, weights.keys, weights.values, step.slots, step.cos_sin, shape.head
        )
        seen = (keys.view(-1, shape.key), values.view(-1, shape.key)) if case.decode else (key, value)
        attended = attend(query, *seen, shape, case)
        x = product(quantised(attended, weights.out), weights.out)
        normed, residual = add_norm(x, residual, weights.mlp_norm, weights.gate_up)
        x = product(gated_product(normed, weights.gate_up, weights.down), weights.down)
        return x, residual, keys, values

    return layer


def make_floor(model: Model) -> Callable[[], Tensor]:
    """The model's products and attention alone; what lies between them was computed before."""
    shape, case, device = model.shape, model.case, model.x.device

    def given(width: int) -> Quantised:
        x = torch.randn(case.tokens, width, device=device, dtype=torch.bfloat16)
        if model.kind == "bf16":
            return x, None
        if model.kind == "fp8":
            scale = model.layers[0].qkv.input_scale
            return ir.ops.static_quant_fp8.native(x, scale), scale
        q, found = ir.ops.dynamic_quant_fp8.native(x)
        return q, found

    hidden, wide, attended = given(shape.hidden), given(shape.intermediate), given(shape.query)

    def run() -> Tensor:
        for weights in model.layers:
            query, key, value = product(hidden, weights.qkv).split((shape.query, shape.key, shape.key), -1)
            seen = (weights.keys, weights.values) if case.decode else (key, value)
            attend(query, *seen, shape, case)
            product(attended, weights.out)
            product(hidden, weights.gate_up)
            x = product(wide, weights.down)
        return x

    return run
