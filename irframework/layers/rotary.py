"""The rotary embedding with its table of cosines and sines, built for a model's base and scaling.

Owns the tables. Does not own what a rotation means (`ops/rotary.py`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from irframework.errors import ConfigError, LayerSizeError, suggest
from irframework.layers.parallel_layer import ParallelLayer
from irframework.op import IrOp
from irframework.ops.kv_cache import rotary_embedding_reshape_and_cache
from irframework.ops.rotary import rotary_embedding


class RotaryEmbedding(ParallelLayer):
    """Rotate queries and keys by their positions: the op `rotary_embedding`.

    Frequencies, angles, cosines and sines are computed in float32, as transformers does: at far positions that decides
    more than a rounding. The table keeps its dtype when the model's is changed.

    Args:
        head_size: Elements of a head.
        max_positions: How many positions the table has.
        base: Of the frequencies, `rope_theta`.
        rotary_dim: Elements of a head that are rotated; default: all.
        is_neox: Rotate halves (Llama) instead of neighbours (GPT-J).
        scaling: A transformers config's `rope_parameters`, or None: `rope_type` is `default`, `linear`, `llama3` or
            `yarn`, with the numbers that it needs.
        dtype: Of the table.
        device: Of the table.

    Attributes:
        cos_sin_cache: `[max_positions, rotary_dim]`, a buffer that is not saved.
        cached_op: What `with_cache` calls.

    Raises:
        LayerSizeError: `rotary_dim` is odd or larger than a head.
        ConfigError: The scaling is of an unknown kind, or lacks a number.
    """

    cos_sin_cache: Tensor
    exact_buffers = ("cos_sin_cache",)
    cached_op: ClassVar[IrOp] = rotary_embedding_reshape_and_cache

    def __init__(
        self,
        head_size: int,
        max_positions: int,
        base: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        is_neox: bool = True,
        scaling: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.max_positions = max_positions
        self.base = float(base)
        self.rotary_dim = head_size if rotary_dim is None else rotary_dim
        self.is_neox = is_neox
        self.scaling = dict(scaling or {})
        self.dtype = dtype
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= head_size:
            raise LayerSizeError(f"rotary_dim={self.rotary_dim} must be even, and at most head_size={head_size}.")
        self.register_buffer("cos_sin_cache", self.exact_buffer("cos_sin_cache", device), persistent=False)

    @classmethod
    def from_config(cls, config: Any, **changes: Any) -> "RotaryEmbedding":
        """Build the embedding that a transformers config describes.

        Args:
            config: Has `hidden_size`, `num_attention_heads`, `max_position_embeddings` and `rope_parameters`, and may
                have `head_dim`.
            **changes: Arguments of the class that are to be others.
        """
        said = dict(config.rope_parameters or {})
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        given = {
            "head_size": head_size,
            "max_positions": config.max_position_embeddings,
            "base": said.get("rope_theta", 10000.0),
            "scaling": said,
        } | changes
        given.setdefault("rotary_dim", int(given["head_size"] * said.get("partial_rotary_factor", 1.0)))
        return cls(**given)

    def exact_buffer(self, name: str, device: Any) -> Tensor:
        """Return the table, `[max_positions, rotary_dim]`.

        Raises:
            ConfigError: The scaling is of an unknown kind, or lacks a number.
        """
        kind = self.scaling.get("rope_type", "default")
        if kind not in _FREQUENCIES:
            raise ConfigError(f"rope_type {kind!r} has no table here.{suggest(str(kind), _FREQUENCIES)}")
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=device) / self.rotary_dim
        try:
            frequencies, factor = _FREQUENCIES[kind](1.0 / self.base**exponents, self)
        except KeyError as error:
            raise ConfigError(f"rope_type {kind!r} needs {error} among the rope_parameters.") from None
        positions = torch.arange(self.max_positions, dtype=torch.float32, device=device)
        angles = positions.unsqueeze(1) * frequencies
        return (torch.cat((angles.cos(), angles.sin()), -1) * factor).to(self.dtype)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the rotated query and key; without a key, the second is None.

        Args:
            positions: `[...]`, int32 or int64.
            query: `[..., heads * head_size]` or `[..., heads, head_size]`.
            key: Like query, or None.
        """
        rotated: tuple[Tensor, Tensor | None] = rotary_embedding(positions, query, key, *self.arguments())
        return rotated

    def with_cache(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotate, and write keys and values to a paged cache: the op `cached_op`.

        Args:
            positions: `[tokens]`, int32 or int64.
            query: `[tokens, heads * head_size]` or `[tokens, heads, head_size]`.
            key: Like query, with its own number of heads.
            value: Like key, with heads of any size.
            key_cache: `[num_blocks, block_size, kv_heads, head_size]`. It is given away: use the one that comes back.
            value_cache: Like key_cache, with the size of a value.
            slot_mapping: Where each token goes, `[tokens]`.

        Returns:
            The rotated query and key, and both caches.
        """
        written: tuple[Tensor, Tensor, Tensor, Tensor] = self.cached_op.maybe_inplace(
            positions, query, key, value, key_cache, value_cache, slot_mapping, *self.arguments()
        )
        return written

    def arguments(self) -> tuple[Any, ...]:
        """Return what the ops take behind the tensors of a call."""
        return self.cos_sin_cache, self.head_size, self.is_neox


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return by how much YaRN sharpens attention for a context that is `factor` times as long.

    Source: Peng et al., "YaRN" (2023), equation 22, with DeepSeek's weight.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _unscaled(frequencies: Tensor, layer: RotaryEmbedding) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, layer: RotaryEmbedding) -> tuple[Tensor, float]:
    """Positions are pressed together. Source: Chen et al., "Positional Interpolation" (2023)."""
    return frequencies / layer.scaling["factor"], 1.0


def _llama3(frequencies: Tensor, layer: RotaryEmbedding) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those in between blended. Source: Llama 3.1 (2024)."""
    said = layer.scaling
    turns = said["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the trained context
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / said["factor"] * (1 - kept), 1.0


def _yarn(frequencies: Tensor, layer: RotaryEmbedding) -> tuple[Tensor, float]:
    """As Llama 3, blended along the number of the frequency. Source: Peng et al., "YaRN" (2023)."""
    said, dim = layer.scaling, layer.rotary_dim
    trained = said["original_max_position_embeddings"]
    factor = said["factor"] or layer.max_positions / trained

    def number_of(turns: float) -> float:
        """Which frequency makes so many turns within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(layer.base))

    first, last = number_of(said.get("beta_fast") or 32), number_of(said.get("beta_slow") or 1)
    if said.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    numbers = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((numbers - first) / max(last - first, 0.001)).clamp(0, 1)
    scale = said.get("attention_factor")
    if scale is None:
        weight, weight_of_all = said.get("mscale"), said.get("mscale_all_dim")
        scale = yarn_scale(factor)
        if weight and weight_of_all:
            scale = yarn_scale(factor, weight) / yarn_scale(factor, weight_of_all)
    return frequencies * kept + frequencies / factor * (1 - kept), scale


_FREQUENCIES: dict[str, Callable[[Tensor, RotaryEmbedding], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
