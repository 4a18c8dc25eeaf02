"""Classes that stand in for a Hugging Face module's class on one instance.

A patch changes the `__class__` of one module to a subclass made here, and nothing else: parameters, buffers, hooks,
`state_dict` keys and `isinstance` stay, and reverting is putting the class back. A patched module can be deep-copied
and pickled (by its original class, so the reader needs irframework). Which modules are patched, and whether a patch
is right, is decided in `transformers.py` and `verification.py`; merged MLP weights live in `merged_weights.py`; the
rewriting of attention forwards in `rotary_call.py`.

Private torch API used here (read in 2.13): what `nn.Module` keeps under `_modules`, `_forward_hooks`,
`_forward_pre_hooks` and `_apply`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from irframework import ops
from irframework.integrations import merged_weights
from irframework.integrations.rotary_call import with_ir_rotary

NORM_EPSILON_NAMES = ("variance_epsilon", "eps")

# How a norm module's parameter becomes the op's weight. `plain` is Llama's, `float` OLMo2's (product in float32),
# `one_plus` Gemma's (the parameter is the distance from one).
NORM_WEIGHTS: dict[str, Callable[[Any], Tensor | None]] = {
    "plain": lambda module: module.weight,
    "float": lambda module: module.weight.float(),
    "one_plus": lambda module: module.weight.float() + 1.0,
}


class PatchedModule:
    """Mark of a patched instance, and how it is copied and pickled."""

    ir_original: type[nn.Module]
    ir_kind: str
    ir_options: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle cannot find it by name: name the original and make it again.
        reduced: Any = super().__reduce_ex__(max(2, int(protocol)))
        _, arguments, *rest = reduced
        return (_rebuild, (self.ir_original, self.ir_kind, self.ir_options, *arguments[1:]), *rest)


def patched_class(original: type[nn.Module], kind: str, options: tuple[Any, ...]) -> type[nn.Module]:
    """The class that replaces `original` for a kind of patch; made once per combination.

    Args:
        original: class of the module as the model library made it.
        kind: `rms_norm`, `gated_mlp`, `rotary` or `add_norm`.
        options: what the kind needs: (weight form, epsilon's name), (activation, layout), (interleaving,) or
            (norm's name, parameter names of forward).

    Raises:
        TypeError: for `rotary`, when the forward cannot be pointed at another function.
    """
    key = (original, kind, options)
    if key not in _classes:
        # Two threads may both make one; the first stays, so that equal patches have one class.
        _classes.setdefault(key, _make_class(original, kind, options))
    return _classes[key]


_classes: dict[tuple[type[nn.Module], str, tuple[Any, ...]], type[nn.Module]] = {}


def _make_class(original: type[nn.Module], kind: str, options: tuple[Any, ...]) -> type[nn.Module]:
    members = _MEMBERS[kind](original, *options)
    # Name and module stay: device maps and recorders of hidden states look classes up by name.
    members.update(
        __module__=original.__module__,
        __qualname__=original.__qualname__,
        ir_original=original,
        ir_kind=kind,
        ir_options=options,
    )
    return type(original.__name__, (PatchedModule, original), members)


def _rebuild(original: type[nn.Module], kind: str, options: tuple[Any, ...], *arguments: Any) -> nn.Module:
    cls = patched_class(original, kind, options)
    return cls.__new__(cls, *arguments)


def _norm_members(original: type[nn.Module], form: str, epsilon_name: str) -> dict[str, Any]:
    weight_of = NORM_WEIGHTS[form]

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = weight_of(self)
        # Llama's product promotes when the dtypes differ; the op returns its input's dtype. Keep the original then.
        if form == "plain" and weight is not None and weight.dtype != hidden_states.dtype:
            return original.forward(self, hidden_states)  # type: ignore[no-any-return]
        return ops.rms_norm(hidden_states, weight, getattr(self, epsilon_name))  # type: ignore[no-any-return]

    return {"forward": forward}


def _gated(activation: str) -> Callable[[Tensor], Tensor]:
    if activation == "silu":
        return ops.silu_and_mul
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return lambda x: cast(Tensor, ops.gelu_and_mul(x, approximate))


def _packed_mlp_members(original: type[nn.Module], activation: str) -> dict[str, Any]:
    """MLPs whose gate and up are one linear already (Phi3)."""
    gated = _gated(activation)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_up_proj(hidden_states)))  # type: ignore[no-any-return]

    return {"forward": forward}


def _split_mlp_members(original: Any, activation: str) -> dict[str, Any]:
    """MLPs with gate and up apart: one matrix product over both when their weights are merged."""
    gated = _gated(activation)

    def forward(self: Any, x: Tensor) -> Tensor:
        merged = merged_weights.current(self)
        if merged is None:
            both = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
        else:
            both = nn.functional.linear(x, merged.weight, merged.bias)
        return self.down_proj(gated(both))  # type: ignore[no-any-return]

    def apply_to_tensors(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        # `.to`, `.half`, `.cuda` give gate and up memory of their own; put them together again.
        result = original._apply(self, fn, *args, **kwargs)
        merged_weights.merge(self)
        return result

    def get_state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != merged_weights.ATTRIBUTE}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        original.__setstate__(self, state)
        merged_weights.merge(self)  # copies of the two parameters do not share memory

    return {"forward": forward, "_apply": apply_to_tensors, "__getstate__": get_state, "__setstate__": set_state}


def _mlp_members(original: type[nn.Module], activation: str, layout: str) -> dict[str, Any]:
    return (_split_mlp_members if layout == "split" else _packed_mlp_members)(original, activation)


def _rotary_members(original: type[nn.Module], is_neox: bool) -> dict[str, Any]:
    return {"forward": with_ir_rotary(original.forward, is_neox)}


def _add_norm_members(original: type[nn.Module], norm_name: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Decoder layers in which a residual add is followed by the norm `norm_name`.

    The two known forms (`LAYER_FORMS`): the norm after attention is the MLP's input norm (Llama), or a norm on the
    attention's output comes before the add and a norm on the MLP's output after it (Gemma). The caller keeps
    `hidden_states` (recorders of hidden states hold it), so it is not donated.
    """
    sandwich = norm_name == "pre_feedforward_layernorm"

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm = getattr(self, norm_name)
        if norm._forward_hooks or norm._forward_pre_hooks:
            return original.forward(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        if args:
            kwargs.update(zip(names, args, strict=False))
        attention, *_ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if sandwich:
            attention = self.post_attention_layernorm(attention)
        elif "resid_attn_dropout" in self._modules:
            attention = self.resid_attn_dropout(attention)
        form, epsilon_name = norm.ir_options
        weight = NORM_WEIGHTS[form](norm)
        epsilon = getattr(norm, epsilon_name)
        normed, residual = ops.fused_add_rms_norm(attention, hidden_states, weight, epsilon)
        out = self.mlp(normed)
        if sandwich:
            out = self.post_feedforward_layernorm(out)
        elif "resid_mlp_dropout" in self._modules:
            out = self.resid_mlp_dropout(out)
        return residual + out  # type: ignore[no-any-return]

    return {"forward": forward}


_COMMON = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
LAYER_FORMS: dict[frozenset[str], str] = {
    _COMMON: "post_attention_layernorm",
    _COMMON | {"resid_attn_dropout", "resid_mlp_dropout"}: "post_attention_layernorm",
    _COMMON | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}: "pre_feedforward_layernorm",
}
"""Names of a decoder layer's children -> the norm that follows the residual add after attention."""

_MEMBERS: dict[str, Callable[..., dict[str, Any]]] = {
    "rms_norm": _norm_members,
    "gated_mlp": _mlp_members,
    "rotary": _rotary_members,
    "add_norm": _add_norm_members,
}


def positional_names(original: type[nn.Module]) -> tuple[str, ...]:
    """Names of forward's parameters after `self` and the hidden states, in order."""
    parameters = list(inspect.signature(original.forward).parameters.values())[2:]
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
