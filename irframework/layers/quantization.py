"""How a layer quantises what it returns: the scheme, and the fused op that a layer calls for it.

Does not own what quantised values mean (`ops/quantization.py`, `ops/block_quantization.py`), nor the fused ops.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from irframework.errors import ConfigError, suggest
from irframework.layers.parallel_layer import ParallelLayer
from irframework.op import IrOp
from irframework.registry import registry

_ENDINGS = {  # of the names of fused ops
    "static": "static_quant_fp8",
    "dynamic": "dynamic_quant_fp8",
    "group": "group_quant_fp8",
    "nvfp4": "quant_nvfp4",
}
_SCALES = {"static": "scale", "nvfp4": "global_scale"}  # that a layer keeps, as its fused op calls it


@dataclass(frozen=True, slots=True)
class Quantization:
    """How rows become codes and scales.

    Attributes:
        kind: `static`, fp8 with one scale that the layer keeps; `dynamic`, fp8 with a scale found for each row;
            `group`, fp8 with one for each group of a row; `nvfp4`, blocks of 16 below one scale that the layer keeps.
        group_size: Elements of a group, of kind `group`.
        column_major_scales: Keep the scales of one group of all tokens side by side, of kind `group`.
        power_of_two_scales: Raise scales to powers of two, of kind `group`.

    Raises:
        ConfigError: There is no such kind, or an attribute of groups is given for another one.
    """

    kind: str
    group_size: int = 128
    column_major_scales: bool = False
    power_of_two_scales: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _ENDINGS:
            raise ConfigError(f"There is no quantisation {self.kind!r}.{suggest(str(self.kind), _ENDINGS)}")
        of_groups = (self.group_size, self.column_major_scales, self.power_of_two_scales)
        if self.kind != "group" and of_groups != (128, False, False):
            raise ConfigError(f"Only the quantisation 'group' has groups, {self.kind!r} has none: {self}.")


class QuantizingLayer(ParallelLayer):
    """A layer that may quantise what it returns, in the same kernel.

    Attributes:
        quantization: How, or None.
        scale: With the kinds `static` and `nvfp4` one float32 number, a buffer; it keeps its dtype when the model's is
            changed.
    """

    scale: Tensor

    def __init__(self, group: Any = None, *, quantization: Quantization | None = None, device: Any = None) -> None:
        super().__init__(group)
        self.quantization = quantization
        if quantization is not None and quantization.kind in _SCALES:
            self.exact_buffers = ("scale",)
            self.register_buffer("scale", self.exact_buffer("scale", device))

    def exact_buffer(self, name: str, device: Any) -> Tensor:
        """Return a scale of one."""
        return torch.ones((), dtype=torch.float32, device=device)

    def fused(self, *ops: IrOp) -> tuple[IrOp, ...]:
        """Return the ops that do what these do and quantise the result as the layer does.

        Raises:
            ConfigError: There is none.
        """
        if self.quantization is None:
            return ops
        names = [f"{op.name}_{_ENDINGS[self.quantization.kind]}" for op in ops]
        for op, name in zip(ops, names, strict=True):
            if name not in registry.ops:
                raise ConfigError(f"No op quantises the result of {op.name!r} with {self.quantization}.")
        return tuple(registry.ops[name] for name in names)

    def options(self) -> dict[str, Any]:
        """Return the arguments of a fused op that say how it quantises."""
        said = self.quantization
        if said is None:
            return {}
        if said.kind == "group":
            return {
                "group_size": said.group_size,
                "column_major_scales": said.column_major_scales,
                "power_of_two_scales": said.power_of_two_scales,
            }
        return {_SCALES[said.kind]: self.scale} if said.kind in _SCALES else {}

    def with_scale(self, result: Any) -> Any:
        """Return a fused op's outputs as codes, scales, and what else there is: with one scale it gives no scales."""
        if self.quantization is None or self.quantization.kind != "static":
            return result
        codes, *rest = result if isinstance(result, tuple) else (result,)
        return codes, self.scale, *rest
