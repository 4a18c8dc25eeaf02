"""A mixture of experts, divided over a process group by experts or within each expert.

Does not own how experts are chosen or what they compute (`ops/mixture_of_experts.py`).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from irframework.errors import ArgumentError, LayerSizeError
from irframework.layers.parallel_layer import ParallelLayer
from irframework.ops.mixture_of_experts import fused_moe, fused_topk, grouped_topk

_FORMS = ("tensor", "expert")
_INTERLEAVED = "swigluoai"  # gate and up in turn, not one behind the other


class FusedMoE(ParallelLayer):
    """Send each token through its experts: the ops `fused_topk` or `grouped_topk`, and `fused_moe`.

    Args:
        num_experts: How many experts there are.
        hidden_size: Length of the rows that come in and go out.
        intermediate_size: Width of one expert.
        top_k: Experts per token.
        activation: As for `fused_moe`.
        renormalize: Let the weights of a token add up to 1 (times `scaling_factor`).
        scoring: `softmax` or `sigmoid`.
        num_groups: Choose within groups of experts (DeepSeek); None: among all.
        top_groups: Groups that a token may choose from.
        scaling_factor: Multiplies the weights.
        bias: Whether experts have biases.
        router: A module that gives a token's logits, or None: the caller gives them.
        parallel: `tensor`: every process has a part of every expert; `expert`: every process has some experts whole.
        reduce: Add up over the processes. Else each has its part of the sum, which the caller adds up.
        group: The processes; None for experts that are not divided.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        gate_up_proj: `[experts, 2 * width, hidden_size]`, experts and width of this process.
        down_proj: `[experts, hidden_size, width]`.
        gate_up_proj_bias: `[experts, 2 * width]`, or None.
        down_proj_bias: `[experts, hidden_size]`, or None.

    Raises:
        LayerSizeError: Experts or their width cannot be divided evenly, or `parallel` is another word.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        *,
        activation: str = "silu",
        renormalize: bool = True,
        scoring: str = "softmax",
        num_groups: int | None = None,
        top_groups: int | None = None,
        scaling_factor: float = 1.0,
        bias: bool = False,
        router: nn.Module | None = None,
        parallel: str = "tensor",
        reduce: bool = True,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        if parallel not in _FORMS:
            raise LayerSizeError(f"parallel must be 'tensor' or 'expert', got {parallel!r}.")
        experts, width = num_experts, intermediate_size
        if parallel == "expert":
            experts = self.group.share_of(num_experts, "experts")
        else:
            width = self.group.share_of(intermediate_size, "columns of an expert")
        self.num_experts = num_experts
        self.first_expert = self.group.rank * experts if parallel == "expert" else 0
        self.top_k = top_k
        self.activation = activation
        self.renormalize = renormalize
        self.scoring = scoring
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.scaling_factor = scaling_factor
        self.router = router
        self.parallel = parallel
        self.reduce = reduce

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty((experts, *shape), dtype=dtype, device=device))

        self.gate_up_proj = parameter(2 * width, hidden_size)
        self.down_proj = parameter(hidden_size, width)
        self.gate_up_proj_bias = parameter(2 * width) if bias else None
        self.down_proj_bias = parameter(hidden_size) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weights with random numbers, and the biases with zeros."""
        for weight, bias in ((self.gate_up_proj, self.gate_up_proj_bias), (self.down_proj, self.down_proj_bias)):
            bound = 1 / math.sqrt(max(1, weight.shape[-1]))
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.zeros_(bias)

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return this process's experts, or its part of each."""
        if self.parallel == "expert":
            return self.group.part_of(full, 0)
        if name == "down_proj":
            return self.group.part_of(full, 2)
        if not name.startswith("gate_up"):
            return full
        if self.activation == _INTERLEAVED:
            return self.group.part_of(full, 1)
        return torch.cat([self.group.part_of(half, 1) for half in full.chunk(2, 1)], 1)

    def chosen(self, router_logits: Tensor, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts.

        Args:
            router_logits: `[..., num_experts]`.
            correction_bias: `[num_experts]`, added for the choice only; or None.
        """
        chosen: tuple[Tensor, Tensor]
        if self.num_groups is None and correction_bias is None and self.scaling_factor == 1.0:
            chosen = fused_topk(router_logits, self.top_k, self.renormalize, self.scoring)
        else:
            chosen = grouped_topk(
                router_logits,
                self.top_k,
                self.num_groups or 1,
                self.top_groups or self.num_groups or 1,
                self.renormalize,
                self.scoring,
                correction_bias,
                self.scaling_factor,
            )
        return chosen

    def forward(
        self,
        x: Tensor,
        router_logits: Tensor | None = None,
        *,
        correction_bias: Tensor | None = None,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of what each token's experts give.

        Args:
            x: `[..., hidden_size]`, the same in every process.
            router_logits: `[..., num_experts]`; None where the layer has a router, or the choice is given.
            correction_bias: `[num_experts]`, added for the choice only; or None.
            topk_weights: `[..., top_k]`: a choice that was made elsewhere.
            topk_ids: `[..., top_k]`, likewise.

        Raises:
            ArgumentError: There is neither a router, nor logits, nor a choice.
        """
        if topk_weights is None or topk_ids is None:
            if router_logits is None and self.router is not None:
                router_logits = self.router(x)
            if router_logits is None:
                raise ArgumentError("FusedMoE needs router_logits, or topk_weights and topk_ids: it has no router.")
            topk_weights, topk_ids = self.chosen(router_logits, correction_bias)
        if self.parallel == "expert" and self.group.size > 1:
            local = topk_ids - self.first_expert
            topk_ids = torch.where((local >= 0) & (local < self.down_proj.shape[0]), local, -1)
        added = self.down_proj_bias if self.parallel == "expert" or self.group.rank == 0 else None
        y: Tensor = fused_moe(
            x,
            self.gate_up_proj,
            self.down_proj,
            topk_weights,
            topk_ids,
            self.activation,
            self.gate_up_proj_bias,
            added,
        )
        return self.group.all_reduce(y) if self.reduce else y
