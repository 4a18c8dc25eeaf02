"""Is a patched module the same function as the original? Random inputs, per-dtype tolerance, no global state.

Owns the probes (which weight form a norm has, which activation an MLP has, which halves a rotary rotates) and the
comparison of one module with its original class. Random numbers come from generators of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from irframework import ops
from irframework.integrations.patched_modules import NORM_WEIGHTS
from irframework.integrations.rotary_call import apply_rotary, apply_rotary_interleaved

ROWS = 6
"""Tokens in a probe: odd enough to be no block of any kernel, few enough to cost nothing on a large model."""

# Allowed difference in units of the dtype's epsilon, times the largest value of the reference. A norm or a rotation
# rounds once or twice; a matrix product of another shape sums in another order.
_UNITS = {"rms_norm": 4.0, "rotary": 16.0, "gated_mlp": 32.0, "add_norm": 32.0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest absolute difference of a replacement to its original, and why it may not stay (or None)."""

    max_error: float
    reason: str | None


def compare(kind: str, actual: Tensor, expected: Tensor) -> Comparison:
    """Judges a replacement's output by the tolerance of its kind.

    Args:
        kind: as in `Replaced.kind`.
        actual: output of the replacement.
        expected: output of the original.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return Comparison(
            float("inf"),
            f"returns {actual.dtype} {tuple(actual.shape)}, the original {expected.dtype} {tuple(expected.shape)}",
        )
    if not expected.numel():
        return Comparison(0.0, None)
    error = float((actual.double() - expected.double()).abs().max())
    allowed = _UNITS[kind] * torch.finfo(expected.dtype).eps * max(float(expected.abs().max()), 1e-3)
    if error <= allowed:
        return Comparison(error, None)
    return Comparison(error, f"differs by {error:.3g} from the original on random input, allowed {allowed:.3g}")


def random_input(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers of `like`'s dtype and device, the same on every call with the same seed."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(like.device, like.dtype)


@contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for `module` and its children, without gradients; restored on exit."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in modes:
            child.training = False
        with torch.no_grad():
            yield
    finally:
        for child, training in modes:
            child.training = training


def norm_form(module: nn.Module, epsilon_name: str) -> str | None:
    """Which of `NORM_WEIGHTS` the module's forward computes, or None.

    A copy in bfloat16 with random weights tells the forms apart, which a fresh module's ones or zeros would not.
    """
    probe = copy.deepcopy(module).to(torch.bfloat16)
    weight = probe.weight
    assert isinstance(weight, Tensor)  # the caller looked
    with quiet(probe):
        weight.data = random_input(tuple(weight.shape), weight, seed=1)
        x = random_input((ROWS, weight.shape[0]), weight, seed=2)
        expected = probe(x)
        epsilon = getattr(probe, epsilon_name)
        errors = {}
        for form, weight_of in NORM_WEIGHTS.items():
            verdict = compare("rms_norm", ops.rms_norm.native(x, weight_of(probe), epsilon), expected)
            if verdict.reason is None:
                errors[form] = verdict.max_error
    return min(errors, key=lambda form: errors[form]) if errors else None


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """`silu`, `gelu` or `gelu_tanh` when the function is that on a grid of points, else None."""
    x = torch.linspace(-8, 8, 321, dtype=torch.float64)
    known = {
        "silu": nn.functional.silu(x),
        "gelu": nn.functional.gelu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
    }
    with torch.no_grad():
        y = function(x)
    for name, expected in known.items():
        if y.shape == expected.shape and torch.allclose(y.double(), expected, atol=1e-9, rtol=1e-9):
            return name
    return None


def rotates_halves(original: Callable[..., Any], head_dim: int, rotary_dim: int) -> bool | None:
    """True when `original` rotates the two halves, False for neighbouring pairs, None for anything else."""
    like = torch.empty(0, dtype=torch.float32)
    q = random_input((2, 3, ROWS, head_dim), like, seed=3)
    k = random_input((2, 1, ROWS, head_dim), like, seed=4)
    for is_neox, function in ((True, apply_rotary), (False, apply_rotary_interleaved)):
        cos, sin = random_rotation(ROWS, rotary_dim, like, is_neox)
        expected = original(q, k, cos, sin)
        actual = function(q, k, cos, sin)
        if all(compare("rotary", a, e).reason is None for a, e in zip(actual, expected, strict=True)):
            return is_neox
    return None


def random_rotation(tokens: int, rotary_dim: int, like: Tensor, is_neox: bool = True) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, [1, tokens, rotary_dim], laid out as the model library does."""
    angles = random_input((1, tokens, rotary_dim // 2), torch.empty(0), seed=5)
    angles = torch.cat((angles, angles), dim=-1) if is_neox else angles.repeat_interleave(2, dim=-1)
    return angles.cos().to(like.device, like.dtype), angles.sin().to(like.device, like.dtype)
