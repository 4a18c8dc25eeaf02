"""IR ops inside Hugging Face models: `apply(model)`, `revert(model)`.

Owns the search for replaceable modules and the order of replacing. A module is replaced on its instance (no class of
transformers changes), compared with its original on random input, and put back when it differs. Classes that stand
in: `patched_modules.py`; comparisons: `verification.py`. Families that are tested: llama, mistral, qwen2, qwen3,
gemma2, gemma3, phi3, smollm3, olmo2; others are tried all the same and judged by the comparison.

What is not touched: attention itself (its products, its cache, its masks), embeddings, mixture-of-experts routing.

Private torch API used here (read in 2.13): what `nn.Module` keeps under `_parameters`, `_modules`,
`_forward_hooks` and `_forward_pre_hooks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from irframework.errors import IrError
from irframework.integrations import merged_weights, rotary_call, verification
from irframework.integrations.patch_report import PatchReport, Replaced, Skipped
from irframework.integrations.patched_modules import (
    LAYER_FORMS,
    NORM_EPSILON_NAMES,
    PatchedModule,
    patched_class,
    positional_names,
)

__all__ = ["PatchReport", "Replaced", "Skipped", "apply", "revert"]

_RECORD = "ir_patch_errors"


class _RefusedError(Exception):
    """A module that stays as it is; the message is the reason in the report."""


def apply(model: nn.Module) -> PatchReport:
    """Puts IR ops into a Hugging Face model, in place.

    RMS norms call `rms_norm`; gated MLPs compute gate and up as one product and call `silu_and_mul` or `gelu_and_mul`
    (the weights' memory is rearranged, not doubled, see `merged_weights`); attention calls `rotary_embedding`; where
    a residual add is followed by a norm, the decoder layer calls `fused_add_rms_norm`. Applying twice changes nothing
    more. The model keeps its parameters, its `state_dict` and its classes' names, can be deep-copied and pickled.

    Args:
        model: any `torch.nn.Module`; modules it recognises are replaced.

    Returns:
        What was replaced, with the error of each on random input, and what was not and why.

    Raises:
        TypeError: `model` is no module.
    """
    _require_module(model)
    finder = _Patcher(merged_weights.owners_of_memory(model))
    modules = dict(model.named_modules())
    # Norms before decoder layers: a layer's fused op reads its norm's weight form.
    for attempt in (finder.norm, finder.mlp, finder.attention, finder.layer):
        for name, module in modules.items():
            attempt(name, module)
    return PatchReport(type(model).__name__, tuple(finder.replaced), tuple(finder.skipped))


def revert(model: nn.Module) -> None:
    """Undoes `apply`, bit for bit: the modules' classes return, gate and up get memory of their own again.

    Args:
        model: a model, patched or not.

    Raises:
        TypeError: `model` is no module.
    """
    _require_module(model)
    for module in model.modules():
        if isinstance(module, PatchedModule):
            _unpatch(module)


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"irframework.integrations.transformers works on a torch.nn.Module, not on {type(model).__name__}; "
            "pass the loaded model (AutoModelForCausalLM.from_pretrained(...))"
        )


def _unpatch(module: Any) -> None:
    if module.ir_kind == "gated_mlp":
        merged_weights.split(module)
    module.__class__ = module.ir_original
    module.__dict__.pop(_RECORD, None)


class _Patcher:
    """One run of `apply`: tries modules, keeps what passes, remembers what did not."""

    def __init__(self, owners: Counter[int]) -> None:
        self._owners = owners
        self.replaced: list[Replaced] = []
        self.skipped: list[Skipped] = []
        self._forms: dict[tuple[type[nn.Module], bool], str | None] = {}

    def norm(self, name: str, module: nn.Module) -> None:
        if "RMSNorm" in type(module).__name__:
            self._attempt(name, module, "rms_norm", "rms_norm", self._patch_norm)

    def mlp(self, name: str, module: nn.Module) -> None:
        children = module._modules
        if "down_proj" in children and ("gate_proj" in children or "gate_up_proj" in children):
            self._attempt(name, module, "gated_mlp", _gated_op(module), self._patch_mlp)

    def attention(self, name: str, module: nn.Module) -> None:
        if type(module).__name__.endswith("Attention"):
            self._attempt(name, module, "rotary", "rotary_embedding", self._patch_attention)

    def layer(self, name: str, module: nn.Module) -> None:
        if "self_attn" in module._modules and "mlp" in module._modules:
            self._attempt(name, module, "add_norm", "fused_add_rms_norm", self._patch_layer)

    def _attempt(self, name: str, module: nn.Module, kind: str, op: str, patch: Callable[[nn.Module], float]) -> None:
        if isinstance(module, PatchedModule):
            if kind == "gated_mlp" and "gate_proj" in module._modules and merged_weights.current(module) is None:
                merged_weights.merge(module)  # its parameters were given other memory since
            self.replaced.append(Replaced(name, kind, op, module.__dict__.get(_RECORD, 0.0)))
            return
        try:
            if "forward" in module.__dict__:
                raise _RefusedError("its forward was replaced on this instance already (an offloading hook?)")
            if any(parameter.is_meta for parameter in module.parameters()):
                raise _RefusedError("its parameters are on the meta device")
            with verification.quiet(module):
                error = patch(module)
        except Exception as caught:  # any failure means "leave it alone", and the reason is in the report
            if isinstance(module, PatchedModule):
                _unpatch(module)
            if isinstance(caught, _RefusedError | IrError):
                reason = str(caught)
            else:
                reason = f"{type(caught).__name__} while trying it: {caught}"
            self.skipped.append(Skipped(name, kind, reason))
        else:
            module.__dict__[_RECORD] = error
            self.replaced.append(Replaced(name, kind, op, error))

    def _patch_norm(self, module: Any) -> float:
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 1:
            raise _RefusedError("it has no one-dimensional weight")
        names = [n for n in NORM_EPSILON_NAMES if isinstance(getattr(module, n, None), float)]
        if not names:
            raise _RefusedError(f"it has no epsilon under a known name ({', '.join(NORM_EPSILON_NAMES)})")
        key = (type(module), weight.dtype.is_floating_point)
        if key not in self._forms:
            self._forms[key] = verification.norm_form(module, names[0])
        form = self._forms[key]
        if form is None:
            raise _RefusedError("its formula is none of the known spellings of rms_norm")
        x = verification.random_input((verification.ROWS, weight.shape[0]), weight)
        return _swap(module, "rms_norm", (form, names[0]), lambda: module(x))

    def _patch_mlp(self, module: Any) -> float:
        function = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
        activation = None if function is None else verification.activation_name(function)
        if activation is None:
            raise _RefusedError("its activation is neither silu nor gelu")
        layout = "split" if "gate_proj" in module._modules else "packed"
        first = module.gate_proj if layout == "split" else module.gate_up_proj
        if layout == "split":
            obstacle = merged_weights.obstacle(module)
            if obstacle is not None:
                raise _RefusedError(obstacle)
            for weight in (module.gate_proj.weight, module.up_proj.weight):
                if self._owners[weight.untyped_storage().data_ptr()] > 1:
                    raise _RefusedError("its weights share memory with another parameter, and would be moved")
        elif not isinstance(first, nn.Linear):
            raise _RefusedError(f"gate_up_proj is a {type(first).__name__}, not a nn.Linear")
        x = verification.random_input((verification.ROWS, first.in_features), first.weight)
        prepare = merged_weights.merge if layout == "split" else None
        return _swap(module, "gated_mlp", (activation, layout), lambda: module(x), prepare)

    def _patch_attention(self, module: Any) -> float:
        original = rotary_call.original_rotary(type(module).forward)
        if original is None:
            raise _RefusedError(f"its forward does not call {rotary_call.CALLED_NAME}")
        inputs, rotary_dim = _attention_inputs(module)
        is_neox = verification.rotates_halves(original, module.head_dim, rotary_dim)
        if is_neox is None:
            raise _RefusedError("it rotates neither halves nor neighbouring pairs")
        before = rotary_call.calls_so_far()
        error = _swap(module, "rotary", (is_neox,), lambda: module(**inputs)[0])
        if rotary_call.calls_so_far() == before:
            raise _RefusedError("this layer uses no rotary embedding")
        return error

    def _patch_layer(self, module: Any) -> float:
        norm_name = LAYER_FORMS.get(frozenset(module._modules))
        if norm_name is None:
            raise _RefusedError("no norm follows its residual add, or it has parts that are not known")
        norm = module._modules[norm_name]
        if getattr(norm, "ir_kind", None) != "rms_norm":
            raise _RefusedError(f"its {norm_name} was not replaced")
        if norm._forward_hooks or norm._forward_pre_hooks:
            raise _RefusedError(f"its {norm_name} has hooks, which the fused op would not call")
        inputs, _ = _attention_inputs(module.self_attn)
        options = (norm_name, positional_names(type(module)))
        return _swap(module, "add_norm", options, lambda: _first(module(**inputs)))


def _swap(
    module: nn.Module,
    kind: str,
    options: tuple[Any, ...],
    call: Callable[[], torch.Tensor],
    prepare: Callable[[nn.Module], object] | None = None,
) -> float:
    """Replaces the class, compares, and returns the error; raises `_RefusedError` when the module may not stay."""
    expected = call()
    module.__class__ = patched_class(type(module), kind, options)
    if prepare is not None:
        prepare(module)
    verdict = verification.compare(kind, call(), expected)
    if verdict.reason is not None:
        raise _RefusedError(verdict.reason)
    return verdict.max_error


def _gated_op(module: nn.Module) -> str:
    function: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    name = None if function is None else verification.activation_name(function)
    return "silu_and_mul" if name == "silu" else "gelu_and_mul"


def _attention_inputs(module: Any) -> tuple[dict[str, Any], int]:
    """Arguments for a call of an attention module or decoder layer on random input, and the rotary dimension."""
    config = getattr(module, "config", None)
    parameters = config.rope_parameters if config is not None and hasattr(config, "rope_parameters") else {}
    factor = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
    rotary_dim = int(module.head_dim * (factor or 1.0))
    projection = module._modules.get("q_proj") or module._modules.get("qkv_proj")
    if projection is None:
        raise _RefusedError("it has neither q_proj nor qkv_proj")
    weight = projection.weight
    hidden = verification.random_input((2, verification.ROWS, projection.in_features), weight)
    rotation = verification.random_rotation(verification.ROWS, rotary_dim, weight)
    return {"hidden_states": hidden, "position_embeddings": rotation, "attention_mask": None}, rotary_dim


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found
