"""Whether implementations keep their op's contract, asked on demand: what `irframework check` shows.

Owns which implementations are checked, and the results as values. Does not own how one is tried (`trial.py`). It is no
proof of numerics: results are compared with native at a few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from irframework.errors import DeviceUnavailableError, UnknownProviderError, suggest
from irframework.op import NATIVE, IrOp
from irframework.registry import all_ops, load_plugins
from irframework.testing.samples import DTYPES, SHAPES, samples
from irframework.testing.trial import Trial, Violation

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one implementation.

    Attributes:
        op: The op's name.
        provider: The provider's name.
        plugin: The plugin that registered it, or None.
        version: The version of the plugin's distribution, or None.
        source: `file:line` of the registration.
        device: The device it was tried on.
        calls: How many calls it was tried on.
        skipped: Why it was not tried at all, or None.
        violations: The rules that it broke.
    """

    op: str
    provider: str
    plugin: str | None
    version: str | None
    source: str
    device: str
    calls: int = 0
    skipped: str | None = None
    violations: tuple[Violation, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        return asdict(self)


def check_contracts(
    provider: str | None = None, ops: Sequence[IrOp] | None = None, device: str | None = None
) -> list[Checked]:
    """Check implementations, those of all providers but native if none is named.

    Args:
        provider: Only this provider's.
        ops: Only these ops' (default: all).
        device: Where they are tried; default: the current platform's.

    Returns:
        One result per implementation, by op and provider.

    Raises:
        UnknownProviderError: The provider has no implementation of any of the ops.
        DeviceUnavailableError: torch cannot use the device here.
    """
    load_plugins()
    where = _usable(device)
    impls = [impl for op in (ops or all_ops().values()) for impl in op.impls.values()]
    if provider is not None and provider not in {impl.provider for impl in impls}:
        which = f"op {', '.join(op.name for op in ops)}" if ops else "any op"
        known = suggest(provider, {impl.provider for impl in impls})
        raise UnknownProviderError(f"Provider {provider!r} has no implementation of {which}.{known}")
    chosen = [impl for impl in impls if impl.provider == provider or (provider is None and impl.provider != NATIVE)]
    return [check_contract(impl, where) for impl in sorted(chosen, key=lambda impl: (impl.op.name, impl.provider))]


def check_contract(
    impl: IrOpImpl,
    device: str | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Checked:
    """Check one implementation.

    Args:
        impl: The implementation, e.g. `ir.ops.rms_norm.impls["triton"]`.
        device: Where it is tried; default: the current platform's device.
        shapes: Of the op's first activation.
        dtypes: Of the activations.

    Raises:
        DeviceUnavailableError: torch cannot use the device here.
    """
    from irframework.plugins import version_of

    where = _usable(device)
    version = version_of(impl.plugin) if impl.plugin else None
    result = Checked(impl.op.name, impl.provider, impl.plugin, version, impl.source, where)
    reason = _why_not_tried(impl, where)
    if reason is not None:
        return replace(result, skipped=reason)
    trial = Trial(impl)
    for sample in samples(impl.op, where, shapes, dtypes):
        trial.try_on(sample)
    trial.finish()
    if not trial.calls:
        return replace(result, skipped=f"it takes none of the calls that were tried: {trial.declined}")
    return replace(result, calls=trial.calls, violations=tuple(trial.found.values()))


def _usable(device: str | None) -> str:
    from irframework.platform import current_platform

    where = device or current_platform().device_types[0]
    try:
        torch.empty(1, device=where)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise DeviceUnavailableError(f"Device {where!r} cannot be used here: {first}") from error
    return where


def _why_not_tried(impl: IrOpImpl, device: str) -> str | None:
    if not impl.supported:
        return impl.unsupported_reason
    kind = torch.device(device).type
    if impl.device_types is not None and kind not in impl.device_types:
        return f"runs on {', '.join(impl.device_types)}, not on {kind}"
    if impl.op.input_generator is None:
        return f"op {impl.op.name!r} has no input generator: register one with register_input_generator"
    return None
