"""The matrix of ops and providers, as values: who has an implementation of what, who runs here, and who is chosen.

Owns the families under which ops are listed. Does not decide and does not print: see `dispatch.py` and `ops.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

CHOSEN, SUPPORTED, UNSUPPORTED, NO = "chosen", "supported", "unsupported", "no"

# Families in the order in which they are shown, with the modules of `irframework.ops` that hold their meanings.
FAMILIES: dict[str, tuple[str, ...]] = {
    "norm": ("layernorm", "gated_norm"),
    "activation": ("activation", "pointwise_activation"),
    "rotary": ("rotary", "multimodal_rotary", "rotate_half", "normed_rotary"),
    "attention": ("softmax_attention", "latent_attention", "fused_latent_attention"),
    "cache": ("kv_cache",),
    "encoder": ("encoder_attention",),
    "quantisation": ("quantization", "block_quantization", "fused_quantization", "fused_block_quantization"),
    "linear, embedding and logits": ("projection", "scaled_projection", "fused_projection"),
    "MoE": ("mixture_of_experts",),
    "Mamba": ("state_space", "state_space_dual", "causal_convolution"),
    "convolution": ("convolution",),
    "collectives": ("collectives", "fused_collectives"),
}


def family_of(op: IrOp) -> str:
    """The family of a standard op; for another one, who brought it."""
    package, _, module = (op.native.__module__ or "").rpartition(".")
    if package == "irframework.ops":
        for family, modules in FAMILIES.items():
            if module in modules:
                return family
    return f"of plugin {op.plugin}" if op.plugin else "others"


def by_family(ops: Iterable[IrOp]) -> dict[str, list[IrOp]]:
    """Ops by family, families in their order, those of plugins last."""
    order = list(FAMILIES)
    found: dict[str, list[IrOp]] = {}
    for op in ops:
        found.setdefault(family_of(op), []).append(op)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def providers_of(ops: Iterable[IrOp]) -> list[str]:
    """All providers of some ops: native, then the others by name."""
    names = {provider for op in ops for provider in op.impls}
    return sorted(names, key=lambda name: (name != "native", name))


def states(op: IrOp, providers: Iterable[str]) -> dict[str, str]:
    """What each provider is to an op here: chosen for a usual call, supported, unsupported, or no provider of it."""
    from irframework.cli.diagnosis import DecisionNow, usual_decision

    decision = usual_decision(op, "eager")
    chosen = decision.provider if isinstance(decision, DecisionNow) else None
    return {provider: _state(op.impls.get(provider), chosen) for provider in providers}


def _state(impl: IrOpImpl | None, chosen: str | None) -> str:
    if impl is None:
        return NO
    if impl.provider == chosen:
        return CHOSEN
    return SUPPORTED if impl.supported else UNSUPPORTED
