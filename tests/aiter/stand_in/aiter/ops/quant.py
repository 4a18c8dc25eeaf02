"""AITER's quantisation, in torch: as on gfx950, where what has no code becomes NaN."""

import torch
from torch import Tensor

from aiter.record import called, rows


def static_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    called("static_per_tensor_quant", input)
    rows("static_per_tensor_quant", out, input)
    if out.dtype != torch.float8_e4m3fn or not out.is_contiguous() or out.shape[-1] % 16:
        raise RuntimeError(f"static_per_tensor_quant: out {out.dtype}, {tuple(out.shape)}, strides {out.stride()}")
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise RuntimeError(f"static_per_tensor_quant: scale {scale.dtype}, {tuple(scale.shape)}")
    h = input.float() * (1.0 / scale)
    out.copy_(torch.where(h.abs() > 464, torch.nan, h.clamp(-448, 448)))
