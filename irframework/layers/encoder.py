"""What encoders of images, videos and sounds are made of: their convolutions, and attention that sees both ways.

Does not own what these mean (`ops/convolution.py`, `ops/encoder_attention.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from irframework.errors import LayerSizeError
from irframework.layers.parallel_layer import ParallelLayer
from irframework.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from irframework.ops.convolution import conv2d, conv3d
from irframework.ops.encoder_attention import mm_encoder_attention
from irframework.ops.multimodal_rotary import apply_rotary_emb


class _Convolution(ParallelLayer):
    """Kernels over a number of spatial dimensions."""

    dims: int
    op: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise LayerSizeError(f"{groups} groups do not divide {in_channels} and {out_channels} channels.")
        self.kernel_size, self.stride, self.padding, self.dilation = (
            [value] * self.dims if isinstance(value, int) else list(value)
            for value in (kernel_size, stride, padding, dilation)
        )
        self.groups = groups
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_channels, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters with random numbers, as torch's convolutions do."""
        bound = 1 / math.sqrt(max(1, self.weight[0].numel()))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, out_channels, ...]` for `[batch, in_channels, ...]`; both may lack the batch."""
        y: Tensor = self.op(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return y


class Conv2d(_Convolution):
    """Convolve images: the op `conv2d`, e.g. the patch embedding of a vision encoder.

    Args:
        in_channels: Channels that come in.
        out_channels: Channels that go out.
        kernel_size: Height and width of the kernel, or one number for both; so are the next three.
        stride: Steps of the kernel.
        padding: Zeros on each side.
        dilation: Distance of the kernel's elements.
        groups: Parts that the channels are divided into.
        bias: Whether a bias is added.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[out_channels, in_channels / groups, height, width]`.
        bias: `[out_channels]`, or None.

    Raises:
        LayerSizeError: The groups do not divide the channels.
    """

    dims = 2
    op = conv2d


class Conv3d(_Convolution):
    """Convolve videos: the op `conv3d`. Arguments and attributes are those of `Conv2d`, with a depth in front."""

    dims = 3
    op = conv3d


class EncoderAttention(ParallelLayer):
    """Attention in which every token sees its whole sequence, with its projections: `mm_encoder_attention`.

    Args:
        hidden_size: Length of the rows that come in and go out.
        num_heads: Heads of all processes together.
        head_size: Elements of a head; default: `hidden_size / num_heads`.
        bias: Whether the projections have biases.
        scale: Of the scores; default: `1 / sqrt(head_size)`.
        is_neox: Where angles are given: rotate halves instead of neighbours.
        group: The processes; None for a layer that is not divided.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        qkv_proj: Queries, keys and values; it takes the weights of `q_proj`, `k_proj` and `v_proj`.
        out_proj: The output.

    Raises:
        LayerSizeError: The heads cannot be divided evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_size: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        is_neox: bool = True,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        self.group.share_of(num_heads, "heads")
        if head_size is None and hidden_size % num_heads:
            raise LayerSizeError(f"{num_heads} heads do not divide {hidden_size} columns; give head_size.")
        self.head_size = hidden_size // num_heads if head_size is None else head_size
        self.scale = scale
        self.is_neox = is_neox
        where: dict[str, Any] = {"group": self.group, "dtype": dtype, "device": device}
        inner = num_heads * self.head_size
        self.qkv_proj = ColumnParallelLinear(
            hidden_size, [inner] * 3, bias, merged_from=("q_proj", "k_proj", "v_proj"), **where
        )
        self.out_proj = RowParallelLinear(inner, hidden_size, bias, **where)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        seq_lens: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: Packed `[tokens, hidden_size]` or padded `[batch, length, hidden_size]`.
            cu_seqlens: Packed: where sequences start, and where the last one ends, int32; None: one sequence.
            max_seqlen: With cu_seqlens, tokens of the longest sequence, or more.
            seq_lens: Padded: tokens of each sequence, int32; None: no padding.
            cos: Cosines of the rotation of each token, `[..., tokens, rotary_dim / 2]`, or None.
            sin: Sines, likewise.

        Returns:
            Like x.
        """
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in self.qkv_proj.split(self.qkv_proj(x)))
        if cos is not None and sin is not None:
            q, k = (apply_rotary_emb(part, cos, sin, self.is_neox) for part in (q, k))
        y: Tensor = mm_encoder_attention(q, k, v, cu_seqlens, max_seqlen, seq_lens, self.scale)
        return self.out_proj(y.flatten(-2))  # type: ignore[no-any-return]
