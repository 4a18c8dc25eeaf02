"""Every error a user of irframework can cause, one class per mistake.

Owns the classes and how their messages are laid out. Does not decide when a mistake was made: the module that
notices it raises. Each class is an `IrError`, and also the built-in error that a Python user would expect there.
"""

import difflib
from collections.abc import Iterable


class IrError(Exception):
    """Base class of all errors of irframework."""


class UnknownOpError(IrError, AttributeError, ValueError):
    """An op was named that nobody registered."""


class UnknownProviderError(IrError, ValueError):
    """A provider was named that has no implementation of that op."""


class InvalidOpError(IrError, ValueError):
    """An op's declaration cannot be turned into an op (name, annotations, activations)."""


class DuplicateOpError(IrError, ValueError):
    """Two different functions were declared as the same op."""


class DuplicateImplementationError(IrError, ValueError):
    """One provider registered two implementations of the same op."""


class ReservedNameError(IrError, ValueError):
    """A name was used that the framework keeps for itself."""


class SignatureError(IrError, ValueError):
    """An implementation or predicate does not have the op's signature."""


class InvalidFusionError(IrError, ValueError):
    """The body of an op that is declared with `fuse` cannot be a pattern: it overwrites, or depends on data."""


class DuplicateFusionError(IrError, ValueError):
    """Two ops that are declared with `fuse` compute the same, so that which one a graph gets would be chance."""


class SpellingError(IrError, ValueError):
    """A further spelling of an op computes something else than the op."""


class ConditionError(IrError, ValueError):
    """A condition of `ir.supports` names a parameter the op does not have, or has a value it cannot check."""


class PrioritySyntaxError(IrError, ValueError):
    """A priority string or list cannot be read."""


class ConfigError(IrError, ValueError):
    """A configuration object was given values that are not allowed."""


class ArgumentError(IrError, TypeError, ValueError):
    """An op was called with an argument of the wrong type, dtype or size."""


class DeviceMismatchError(IrError, RuntimeError, ValueError):
    """The tensors of one call live on different devices."""


class ImplementationContractError(IrError, RuntimeError):
    """An implementation returned something its op does not allow (count, shape, dtype, device)."""


class PredicateGuardError(IrError, RuntimeError):
    """A predicate looked at a symbolic size, so that the choice would hold for one batch size only."""


class InplaceError(IrError, RuntimeError):
    """`maybe_inplace` was called on an op that was not declared with `allow_inplace=True`."""


class DonationError(IrError, RuntimeError):
    """A tensor that was donated to an op was used afterwards."""


class LoweringError(IrError, RuntimeError):
    """An op in a compiled graph could not be lowered to the chosen implementation."""


class VerifyError(IrError, RuntimeError):
    """A compiler pass left a graph that breaks a rule of the pipeline."""


class PassError(IrError, ValueError):
    """What was given as a compiler pass is none, its stage does not exist, or its order cannot be kept."""


class PluginError(IrError, RuntimeError):
    """A plugin could not be loaded (raised only in strict mode; otherwise it is quarantined)."""


class PlatformError(IrError, RuntimeError, ValueError):
    """The platform was named by the user and does not exist or is not available."""


class ModelError(IrError, ValueError):
    """A model cannot be loaded: missing, damaged, or of a kind that is not supported."""


class ModelNotFoundError(ModelError):
    """Nothing is where the user said a model is."""


class ModelFileError(ModelError):
    """A model's file is damaged, truncated or incomplete."""


class UnsupportedModelError(ModelError):
    """A model has an architecture that cannot be loaded here."""


class MissingDependencyError(IrError, ImportError):
    """A package that an optional part needs is not installed."""


class DeviceUnavailableError(IrError, RuntimeError):
    """A device was named that torch cannot use on this machine."""


class InvalidLayerError(IrError, TypeError, ValueError):
    """A class was registered as a layer that cannot be one, or says `ir_op` about something that is no op."""


class DuplicateLayerError(IrError, ValueError):
    """Two different classes were registered as the same layer, or as the replacement of the same one."""


class ReplacementError(IrError, TypeError, ValueError):
    """A class was registered as the replacement of a layer that it does not subclass."""


class LayerSizeError(IrError, ValueError):
    """A layer was built with sizes that do not fit each other, or cannot be divided over its process group."""


class WeightError(IrError, ValueError):
    """A weight that is loaded into a layer has another name or shape than the layer's."""


class MissingForwardError(IrError, NotImplementedError):
    """A layer was called on a platform that it has no method for."""


class MigrationError(IrError, ValueError):
    """A file that is to be migrated cannot be read, or holds nothing to migrate."""


class NothingToMeasureError(IrError, RuntimeError):
    """A benchmark was asked for, and nobody here takes any of its calls."""


def use_after_donation(what: str, op: str, argument: str, use: str, donated_at: str, used_at: str) -> DonationError:
    """The error for a use after donation, in the words that eager mode and the compiler share.

    Args:
        what: The donated value.
        op: The op that it was donated to.
        argument: The op's parameter.
        use: What is done with it: `returned`, or `used by ...`.
        donated_at: Source line of the `maybe_inplace` call.
        used_at: Source line of the use.
    """
    return DonationError(
        f"{what} was donated to op {op!r} as argument {argument!r} by maybe_inplace, and is {use} afterwards. "
        f"A donated tensor may have been overwritten: use the op's result, or call {op} itself instead of its "
        "maybe_inplace.\n"
        f"  donated at: {donated_at}\n"
        f"  used at:    {used_at}"
    )


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the sentence 'Did you mean ...? Known: ...' for a name that is not among the known ones.

    Args:
        name: What the user wrote.
        known: What would have been right.

    Returns:
        One sentence that starts with a space, or an empty string when nothing is known.
    """
    choices = sorted(set(known))
    if not choices:
        return ""
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint} Known: {', '.join(choices)}."
