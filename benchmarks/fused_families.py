"""The calls that `providers_gpu.py --ops families` measures: a fused op, its parts, and plain torch for the same.

Sizes are those of Llama-3-8B; of DeepSeek-V3 for latent attention. Parts are kernels of the same provider, one after
the other. Plain torch is the op's definition, but for writes to a cache: a definition returns another cache, plain
torch writes to the one that is there. Does not measure anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework.cli.benchmarking import moved_bytes

Arguments = tuple[Any, ...]
Call = Callable[..., Any]
DECODE, PREFILL = (1, 64, 256), (2048, 8192)
FEW = (1, 16, 64, 128, 256)
EPSILON = 1e-6
GROUP = 128


@dataclass(frozen=True)
class Sizes:
    """Of the models."""

    heads: int = 32
    key_heads: int = 8
    head: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    context: int = 1024
    block: int = 16
    latent_heads: int = 128
    latent_head: int = 128
    rank: int = 512
    rope: int = 64
    latent_block: int = 64
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(4, 2, 32, 64, 96, 20, 8, 4, 32, 64, 16, 8, torch.float32)


@dataclass(frozen=True)
class Family:
    """One line of the table.

    Attributes:
        name: For people.
        op: The fused op.
        make: Arguments of the op for a number of tokens.
        parts: What the op stands for, of the kernels by op; None: nothing but plain torch is compared with.
        plain: The same in plain torch; None: the op's definition.
        part_ops: The ops whose kernels `parts` takes.
        unread: Arguments of which a call touches a small part only, which is not among the bytes that it moves.
        tokens: Of the calls.
    """

    name: str
    op: str
    make: Callable[[int, Sizes, str], Arguments]
    parts: Callable[[dict[str, Call]], Call] | None = None
    plain: Call | None = None
    part_ops: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (*DECODE, *PREFILL)

    def moved(self, arguments: Arguments) -> int:
        """Bytes of the arguments that a call reads."""
        names = getattr(ir.ops, self.op).signature.parameters
        return moved_bytes(tuple(a for a, n in zip(arguments, names, strict=False) if n not in self.unread), ())

    def stock(self) -> Call:
        """What stock torch.compile is given."""
        plain: Call = self.plain or getattr(ir.ops, self.op).native
        return plain


# --- queries and keys on their way to the cache ---------------------------------------------------------------------


def normal(*shape: int, sizes: Sizes, device: str) -> Tensor:
    return torch.randn(shape, dtype=sizes.dtype, device=device)


def rotated(tokens: int, sizes: Sizes, device: str, joint: bool = True) -> Arguments:
    """positions, query, key, value, table: parts of one product, or (`joint=False`) each in memory of its own."""
    widths = [sizes.heads * sizes.head, *[sizes.key_heads * sizes.head] * 2]
    parts = normal(tokens, sum(widths), sizes=sizes, device=device).split(widths, -1)
    table = normal(max(sizes.context, tokens), sizes.head, sizes=sizes, device=device).cos()
    return positions_of(tokens, sizes, device), *(parts if joint else (p.contiguous() for p in parts)), table


def positions_of(tokens: int, sizes: Sizes, device: str) -> Tensor:
    """The last of sequences of equal length, or one prompt."""
    token = torch.arange(tokens, device=device)
    return torch.full_like(token, sizes.context - 1) if tokens <= DECODE[-1] else token


def caches(tokens: int, sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Both caches and the slots: the last of a block for each sequence, or those of a prompt side by side."""
    decode = tokens <= DECODE[-1]
    blocks = tokens if decode else -(-tokens // sizes.block)
    shape = (blocks, sizes.block, sizes.key_heads, sizes.head)
    token = torch.arange(tokens, device=device)
    slots = token * sizes.block + sizes.block - 1 if decode else token
    return normal(*shape, sizes=sizes, device=device), normal(*shape, sizes=sizes, device=device), slots


def rotary_and_cache(tokens: int, sizes: Sizes, device: str) -> Arguments:
    positions, *parts, table = rotated(tokens, sizes, device)
    return positions, *parts, *caches(tokens, sizes, device), table, sizes.head, True


def norm_and_rotary(joint: bool) -> Callable[[int, Sizes, str], Arguments]:
    def make(tokens: int, sizes: Sizes, device: str) -> Arguments:
        positions, query, key, _, table = rotated(tokens, sizes, device, joint)
        weights = (normal(sizes.head, sizes=sizes, device=device) for _ in range(2))
        return positions, query, key, *weights, table, sizes.head, EPSILON, True

    return make


def norm_rotary_and_cache(tokens: int, sizes: Sizes, device: str) -> Arguments:
    positions, *parts, table = rotated(tokens, sizes, device)
    weights = (normal(sizes.head, sizes=sizes, device=device) for _ in range(2))
    return positions, *parts, *caches(tokens, sizes, device), *weights, table, sizes.head, EPSILON, True


def rotary_then_cache(kernels: dict[str, Call]) -> Call:
    def call(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
        table: Tensor, head: int, is_neox: bool,
    ) -> Arguments:  # fmt: skip
        query, key = kernels["rotary_embedding"](positions, query, key, table, head, is_neox)
        return query, key, *kernels["reshape_and_cache"](key, value, keys, values, slots)

    return call


def norms_then_rotary(kernels: dict[str, Call]) -> Call:
    def call(
        positions: Tensor, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, table: Tensor,
        head: int, epsilon: float, is_neox: bool,
    ) -> Arguments:  # fmt: skip
        norm = kernels["rms_norm"]
        query = norm(query.unflatten(-1, (-1, head)), query_weight, epsilon, None).flatten(-2)
        key = norm(key.unflatten(-1, (-1, head)), key_weight, epsilon, None).flatten(-2)
        pair: Arguments = kernels["rotary_embedding"](positions, query, key, table, head, is_neox)
        return pair

    return call


def norms_rotary_then_cache(kernels: dict[str, Call]) -> Call:
    turned = norms_then_rotary(kernels)

    def call(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
        query_weight: Tensor, key_weight: Tensor, table: Tensor, head: int, epsilon: float, is_neox: bool,
    ) -> Arguments:  # fmt: skip
        query, key = turned(positions, query, key, query_weight, key_weight, table, head, epsilon, is_neox)
        return query, key, *kernels["reshape_and_cache"](key, value, keys, values, slots)

    return call


def write(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Plain torch: rows to their slots, in place."""
    for cache, rows in ((keys, key), (values, value)):
        cache.view(-1, rows.shape[-1]).index_copy_(0, slots, rows)


def plain_rotary_and_cache(
    positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
    table: Tensor, head: int, is_neox: bool,
) -> Arguments:  # fmt: skip
    query, key = ir.ops.rotary_embedding.native(positions, query, key, table, head, is_neox)
    write(keys, values, slots, key, value)
    return query, key


def plain_norm_rotary_and_cache(
    positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
    query_weight: Tensor, key_weight: Tensor, table: Tensor, head: int, epsilon: float, is_neox: bool,
) -> Arguments:  # fmt: skip
    query, key = ir.ops.qk_norm_rotary_embedding.native(
        positions, query, key, query_weight, key_weight, table, head, epsilon, is_neox
    )
    write(keys, values, slots, key, value)
    return query, key


# --- attention ------------------------------------------------------------------------------------------------------


def sequences(count: int, sizes: Sizes, block: int, device: str) -> tuple[int, Tensor, Tensor, Tensor]:
    """How many blocks there are, and of one query each: where they start, lengths, blocks, which lie in no order."""
    width = -(-sizes.context // block)
    table = torch.randperm(count * width).view(count, width).to(device, torch.int32)
    offsets = torch.arange(count + 1, dtype=torch.int32, device=device)
    return count * width, offsets, torch.full((count,), sizes.context, dtype=torch.int32, device=device), table


def decoding(tokens: int, sizes: Sizes, device: str) -> Arguments:
    blocks, offsets, lengths, table = sequences(tokens, sizes, sizes.block, device)
    query = normal(tokens, sizes.heads, sizes.head, sizes=sizes, device=device)
    shape = (blocks, sizes.block, sizes.key_heads, sizes.head)
    keys, values = (normal(*shape, sizes=sizes, device=device) for _ in range(2))
    code = torch.full((1,), 0.01, device=device)
    paged = (lengths, sizes.context, keys, values, table)
    return query, None, None, offsets, 1, *paged, None, True, None, None, None, code


def latent_decoding(tokens: int, sizes: Sizes, device: str) -> Arguments:
    """In the latent space: the products with key_up and value_up are the model's."""
    blocks, offsets, lengths, table = sequences(tokens, sizes, sizes.latent_block, device)
    query = normal(tokens, sizes.latent_heads, sizes.rank, sizes=sizes, device=device)
    rope = normal(tokens, sizes.latent_heads, sizes.rope, sizes=sizes, device=device)
    rows = normal(blocks, sizes.latent_block, sizes.rank + sizes.rope, sizes=sizes, device=device)
    scale = (sizes.latent_head + sizes.rope) ** -0.5
    code = torch.full((1,), 0.01, device=device)
    return query, rope, None, offsets, 1, scale, None, None, lengths, sizes.context, rows, table, True, code


def latent_decoding_in_groups(tokens: int, sizes: Sizes, device: str) -> Arguments:
    """With both products, as the codes are of what is behind the second."""
    _, rope, _, offsets, one, scale, _, _, *paged, causal, _ = latent_decoding(tokens, sizes, device)
    query = normal(tokens, sizes.latent_heads, sizes.latent_head, sizes=sizes, device=device)
    key_up = normal(sizes.latent_heads, sizes.latent_head, sizes.rank, sizes=sizes, device=device) * sizes.rank**-0.5
    value_up = key_up.transpose(1, 2).contiguous()
    group = GROUP if sizes.latent_heads * sizes.latent_head % GROUP == 0 else sizes.latent_head
    return query, rope, None, offsets, one, scale, key_up, value_up, *paged, causal, group, False, False


def then_static(op: str) -> Callable[[dict[str, Call]], Call]:
    """An op whose last argument is the scale of its codes: without it, then the codes."""

    def parts(kernels: dict[str, Call]) -> Call:
        return lambda *given: kernels["static_quant_fp8"](kernels[op](*given[:-1], None), given[-1])

    return parts


def latent_then_groups(kernels: dict[str, Call]) -> Call:
    def call(*given: Any) -> Any:
        y = kernels["mla_attention"](*given[:-3], None)
        return kernels["group_quant_fp8"](y.flatten(-2), *given[-3:])

    return call


# --- products with a gate -------------------------------------------------------------------------------------------


def product(tokens: int, sizes: Sizes, device: str) -> Arguments:
    """Rows, and the weights of gate and up in one matrix: always bfloat16, for the kernels take no float32."""
    shape = 2 * sizes.intermediate, sizes.hidden
    weight = torch.randn(shape, dtype=torch.bfloat16, device=device) * sizes.hidden**-0.5
    return torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16, device=device), weight, None


def product_of_codes(tokens: int, sizes: Sizes, device: str) -> Arguments:
    """The same as codes; scales take rows, and what is gated, to 14."""
    x, weight, _ = product(tokens, sizes, device)
    x_scale, weight_scale, scale = (torch.full((1,), each, device=device) for each in (1 / 32, 2.0**-12, 1 / 32))
    codes = x.float() / x_scale, weight.float() / weight_scale
    scales = x_scale, weight_scale, scale
    return *(each.clamp(-448, 448).to(torch.float8_e4m3fn) for each in codes), *scales, torch.bfloat16, True


def product_then_gate(kernels: dict[str, Call]) -> Call:
    return lambda x, weight, _: kernels["silu_and_mul"](torch.nn.functional.linear(x, weight))


def product_then_codes(kernels: dict[str, Call]) -> Call:
    def call(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scale: Tensor, *how: Any) -> Any:
        gated = kernels["silu_and_mul_static_quant_fp8"]
        return gated(ir.ops.scaled_linear.native(x, weight, x_scale, weight_scale, *how), scale)

    return call


# --- what models write out ------------------------------------------------------------------------------------------


def gates(*more: Any) -> Callable[[int, Sizes, str], Arguments]:
    def make(tokens: int, sizes: Sizes, device: str) -> Arguments:
        return *(normal(tokens, sizes.intermediate, sizes=sizes, device=device) for _ in range(2)), *more

    return make


def turned_heads(tokens: int, sizes: Sizes, device: str) -> Arguments:
    """One token of each sequence, or one prompt."""
    lead = (tokens, 1) if tokens <= DECODE[-1] else (1, tokens)
    x = normal(*lead, sizes.heads, sizes.head, sizes=sizes, device=device)
    return x, *(normal(*lead, sizes.head, sizes=sizes, device=device).cos() for _ in range(2))


TABLE = ("cos_sin_cache",)
CACHES = ("key_cache", "value_cache", *TABLE)
NORMED = ("rms_norm", "rotary_embedding")
FAMILIES = (
    Family(
        "rotary + cache", "rotary_embedding_reshape_and_cache", rotary_and_cache, rotary_then_cache,
        plain_rotary_and_cache, ("rotary_embedding", "reshape_and_cache"), CACHES,
    ),
    Family(
        "q/k norm + rotary", "qk_norm_rotary_embedding", norm_and_rotary(True), norms_then_rotary, None, NORMED, TABLE
    ),
    Family(
        "q/k norm + rotary, q and k apart", "qk_norm_rotary_embedding", norm_and_rotary(False), norms_then_rotary, None,
        NORMED, TABLE,
    ),
    Family(
        "q/k norm + rotary + cache", "qk_norm_rotary_embedding_reshape_and_cache", norm_rotary_and_cache,
        norms_rotary_then_cache, plain_norm_rotary_and_cache, (*NORMED, "reshape_and_cache"), CACHES,
    ),
    Family(
        "attention + static fp8", "attention", decoding, then_static("attention"), None,
        ("attention", "static_quant_fp8"), (), DECODE,
    ),
    Family(
        "mla_attention + static fp8", "mla_attention", latent_decoding, then_static("mla_attention"), None,
        ("mla_attention", "static_quant_fp8"), (), DECODE,
    ),
    Family(
        "mla_attention + group fp8", "mla_attention_group_quant_fp8", latent_decoding_in_groups, latent_then_groups,
        None, ("mla_attention", "group_quant_fp8"), (), DECODE,
    ),
    Family(
        "product + SiLU gate", "linear_silu_and_mul", product, product_then_gate, None, ("silu_and_mul",), (), FEW,
    ),
    Family(
        "product of fp8 + SiLU gate + static fp8", "scaled_linear_silu_and_mul_static_quant_fp8", product_of_codes,
        product_then_codes, None, ("silu_and_mul_static_quant_fp8",), (), FEW,
    ),
    Family("silu_mul", "silu_mul", gates()),
    Family("gelu_mul", "gelu_mul", gates("tanh")),
    Family("apply_rotary_pos_emb", "apply_rotary_pos_emb", turned_heads),
)  # fmt: skip
