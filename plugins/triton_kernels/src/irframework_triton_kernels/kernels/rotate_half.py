# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The rotary embedding whose cosines and sines are given for every element of a head."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def _sum_of_products(a, b, c, d, wide: tl.constexpr, rounded: tl.constexpr):
    """`a * b + c * d`, rounded to `rounded` after each step, or computed in float32 if `wide`.

    A product and a sum of 16-bit numbers would be contracted to one instruction on sm_90, which does not round the
    product. Products to which zero is added in float32 are not.
    """
    if wide:
        return a * b + c * d
    else:
        first = tl.fma(a, b, 0.0).to(rounded).to(tl.float32)
        second = tl.fma(c, d, 0.0).to(rounded).to(tl.float32)
        return first + second


@triton.jit(do_not_specialize=["tokens"])
def rotate_half_kernel(
    x,
    cos,
    sin,
    y,
    tokens,
    heads,
    half,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Rotates `tile_heads` heads of one of the `tokens` of a sequence. y holds its heads side by side."""
    if early:
        after_predecessor()
    tiles = tl.cdiv(heads, tile_heads)
    program = tl.program_id(0)
    place = (program // tiles).to(tl.int64)
    batch = place // tokens
    token = place % tokens
    head = (program % tiles) * tile_heads + tl.arange(0, tile_heads)[:, None]
    at = tl.arange(0, block)[None, :]
    inside = at < half
    cos += batch * cos_batch_stride + token * cos_token_stride
    sin += batch * sin_batch_stride + token * sin_token_stride
    cos_a = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + half + at, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + half + at, mask=inside, other=0.0).to(tl.float32)
    mask = (head < heads) & inside
    x += batch * x_batch_stride + token * x_token_stride + head.to(tl.int64) * x_head_stride
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + half + at, mask=mask, other=0.0).to(tl.float32)
    element = y.dtype.element_ty
    wide: tl.constexpr = cos.dtype.element_ty != element
    y += (place * heads + head) * (2 * half)
    tl.store(y + at, _sum_of_products(a, cos_a, -b, sin_a, wide, element).to(element), mask=mask)
    tl.store(y + half + at, _sum_of_products(b, cos_b, a, sin_b, wide, element).to(element), mask=mask)
