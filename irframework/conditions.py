"""`ir.supports`: what an implementation can take, stated as data.

Owns the conditions, their Python expressions and their reasons. One list of (test, reason) expressions per condition
set serves two uses: the generated dispatcher inlines the tests, and `explain` evaluates the reasons; so the two cannot
disagree. Does not own predicates written as functions: they are kept beside the data and called after it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from irframework.errors import ConditionError, suggest

Dtypes = torch.dtype | Iterable[torch.dtype]
Predicate = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One test over a call's parameters, as source text.

    Attributes:
        test: Expression that is true when the call is supported.
        reason: Expression (an f-string) that says what was wrong. Evaluated only when the test failed.
        parameters: The op's parameters that both read.
        rests_on: What the test reads of tensors: `kind` (dtype, rank, whether it is None), `last` (the last size),
            `row` (the last stride), `dense` (sizes and strides), `shape` (also in comparison with another tensor) or
            `sizes`. What is known of these answers it for many calls at once, see `known_calls.py`.
    """

    test: str
    reason: str
    parameters: tuple[str, ...]
    rests_on: str


@dataclass(frozen=True, slots=True)
class Supports:
    """A set of conditions, and predicates that are asked after all of them hold. Made by `ir.supports`."""

    options: Mapping[str, Any]
    predicates: tuple[Predicate, ...] = ()
    _checks: dict[tuple[tuple[str, ...], ...], tuple[Check, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __and__(self, other: "Supports | Predicate") -> "Supports":
        if isinstance(other, Supports):
            twice = sorted(set(self.options) & set(other.options))
            if twice:
                raise ConditionError(f"ir.supports: both sides of & state {', '.join(twice)}; state each once.")
            return Supports({**self.options, **other.options}, self.predicates + other.predicates)
        if not callable(other):
            return NotImplemented
        return Supports(self.options, (*self.predicates, other))

    def __rand__(self, other: Predicate) -> "Supports":
        return self & other

    def checks(self, signature: inspect.Signature, tensors: tuple[str, ...]) -> tuple[Check, ...]:
        """Return the conditions as source text for an op.

        Args:
            signature: The op's signature.
            tensors: Names of its tensor parameters, in order.

        Raises:
            ConditionError: A condition names a parameter that the op does not have, or one of the wrong kind, or has a
                value that cannot be checked.
        """
        names = tuple(signature.parameters)
        optional = tuple(name for name in tensors if signature.parameters[name].annotation is not Tensor)
        key = (names, tensors, optional)
        if key not in self._checks:
            self._checks[key] = tuple(_build(self.options, names, tensors, optional))
        return self._checks[key]


def supports(
    *,
    dtype: Dtypes | Mapping[str, Dtypes] | None = None,
    same_dtype: Iterable[str] = (),
    none: Iterable[str] = (),
    contiguous: Iterable[str] = (),
    row_contiguous: Iterable[str] = (),
    ndim: int | Iterable[int] | Mapping[str, int | Iterable[int]] | None = None,
    same_shape: Iterable[str] = (),
    last_dim_of: Mapping[str, str] | None = None,
    multiple_of: Mapping[str, int] | None = None,
    max_last_dim: int | Mapping[str, int] | None = None,
    one_element: Iterable[str] = (),
    one_of: Mapping[str, Iterable[Any]] | None = None,
) -> Supports:
    """State what an implementation takes. A condition about an optional tensor holds when it is None.

    Args:
        dtype: Allowed dtypes of the first tensor parameter, or per parameter.
        same_dtype: These tensors have the dtype of the first of them.
        none: These parameters are None.
        contiguous: These tensors are contiguous.
        row_contiguous: The last dimension of these tensors has stride 1 (other strides are free).
        ndim: Allowed numbers of dimensions of the first tensor parameter, or per parameter.
        same_shape: These tensors have the shape of the first of them.
        last_dim_of: `{"weight": "x"}`: weight is a vector as long as the last dimension of x.
        multiple_of: `{"x": 8}`: the last dimension of x is a multiple of 8.
        max_last_dim: Largest last dimension of the first tensor parameter, or per parameter.
        one_element: These tensors hold one element each, whatever their rank.
        one_of: `{"approximate": ("none", "tanh")}`: allowed values of a parameter that is not a tensor.

    Returns:
        Conditions for `register_impl(supports_args=...)`; `& predicate` adds a function.
    """
    given = {
        "dtype": dtype,
        "same_dtype": _names(same_dtype),
        "none": _names(none),
        "contiguous": _names(contiguous),
        "row_contiguous": _names(row_contiguous),
        "ndim": ndim,
        "same_shape": _names(same_shape),
        "last_dim_of": last_dim_of,
        "multiple_of": multiple_of,
        "max_last_dim": max_last_dim,
        "one_element": _names(one_element),
        "one_of": one_of,
    }
    stated = {
        name: value for name, value in given.items() if value is not None and (value != () or name not in _BY_NAME)
    }
    return Supports({name: _kept(value) for name, value in stated.items()})


def _kept(value: Any) -> Any:
    """Read iterators once: one set of conditions may serve several ops."""
    if isinstance(value, Mapping):
        return {name: _kept(item) for name, item in value.items()}
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise ConditionError(f"ir.supports: expected names of parameters, got {names!r}.")
    return (names,) if isinstance(names, str) else tuple(names)


def _per_parameter(value: Any, tensors: tuple[str, ...], condition: str) -> Mapping[str, Any]:
    """A bare value is about the first tensor parameter."""
    if isinstance(value, Mapping):
        return value
    if not tensors:
        raise ConditionError(f"ir.supports({condition}=...): the op has no tensor parameter.")
    return {tensors[0]: value}


def _many(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _numbers(value: Any, condition: str, least: int) -> tuple[int, ...]:
    numbers = _many(value)
    if not all(type(number) is int and number >= least for number in numbers):
        raise ConditionError(f"ir.supports({condition}=...): expected whole numbers from {least} on, got {value!r}.")
    return numbers


def _number(value: Any, condition: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise ConditionError(f"ir.supports({condition}=...): expected one whole number from {least} on, got {value!r}.")
    return value


def _build(
    options: Mapping[str, Any], names: tuple[str, ...], tensors: tuple[str, ...], optional: tuple[str, ...]
) -> Iterable[Check]:
    for condition, value in options.items():
        for name in _named(condition, value):
            if name not in names:
                raise ConditionError(
                    f"ir.supports({condition}=...) names the parameter {name!r}, which the op does not have."
                    + suggest(str(name), names)
                )
            if condition != "none" and (name in tensors) is (condition == "one_of"):
                what = "a tensor" if condition == "one_of" else "not a tensor"
                raise ConditionError(f"ir.supports({condition}=...) names the parameter {name!r}, which is {what}.")
        for check in _BUILDERS[condition](value, tensors):
            nones = [f"{name} is None" for name in check.parameters if name in optional]
            if nones and condition != "none":  # a condition about a tensor that is not there holds
                check = replace(check, test=f"({' or '.join(nones)} or {check.test})")
            yield check


def _named(condition: str, value: Any) -> Iterable[Any]:
    """The parameters that a condition names; a bare value names none."""
    if isinstance(value, Mapping):
        return (*value, *value.values()) if condition == "last_dim_of" else tuple(value)
    if condition in ("last_dim_of", "multiple_of", "one_of"):
        raise ConditionError(f"ir.supports({condition}=...): expected a mapping from parameters, got {value!r}.")
    return value if condition in _BY_NAME else ()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(value: Any, tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, dtypes in _per_parameter(value, tensors, "dtype").items():
        allowed = _many(dtypes)
        if not allowed or not all(isinstance(d, torch.dtype) for d in allowed):
            raise ConditionError(f"ir.supports(dtype=...): expected torch dtypes for {name!r}, got {dtypes!r}.")
        test = " or ".join(f"{name}.dtype is {d}" for d in allowed)
        wanted = ", ".join(_short(d) for d in allowed)
        reason = f"f\"{name} is {{str({name}.dtype).removeprefix('torch.')}}, needs {wanted}\""
        yield Check(f"({test})", reason, (name,), "kind")


def _same_dtype(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    first = value[0]
    for name in value[1:]:
        reason = (
            f"f\"{name} is {{str({name}.dtype).removeprefix('torch.')}}, needs the dtype of {first}, "
            f"{{str({first}.dtype).removeprefix('torch.')}}\""
        )
        yield Check(f"{name}.dtype is {first}.dtype", reason, (first, name), "kind")


def _none(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name in value:
        shown = f"a tensor of shape {{tuple({name}.shape)}}" if name in tensors else f"{{{name}!r}}"
        yield Check(f"{name} is None", f'f"{name} must be None, is {shown}"', (name,), "kind")


def _contiguous(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name in value:
        reason = f'f"{name} must be contiguous, has strides {{tuple({name}.stride())}}"'
        yield Check(f"{name}.is_contiguous()", reason, (name,), "dense")


def _row_contiguous(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name in value:
        inner = f"{name}.is_contiguous() or {name}.stride()[-1] == 1 or {name}.shape[-1] == 1"
        test = f"({name}.shape and ({inner}))"
        yield Check(test, f'f"the last dimension of {name} must have stride 1"', (name,), "row")


def _ndim(value: Any, tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, ranks in _per_parameter(value, tensors, "ndim").items():
        allowed = _numbers(ranks, "ndim", 0)
        reason = f'f"{name} has {{{name}.dim()}} dimensions, needs {" or ".join(map(str, allowed))}"'
        yield Check(f"{name}.dim() in {allowed!r}", reason, (name,), "kind")


def _same_shape(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    first = value[0]
    for name in value[1:]:
        reason = f'f"{name} has shape {{tuple({name}.shape)}}, needs the shape of {first}, {{tuple({first}.shape)}}"'
        yield Check(f"{name}.shape == {first}.shape", reason, (first, name), "shape")


def _last_dim_of(value: Mapping[str, str], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, of in value.items():
        test = f"({of}.shape and {name}.shape == ({of}.shape[-1],))"
        reason = f'f"{name} has shape {{tuple({name}.shape)}}, needs a vector as long as the last dimension of {of}"'
        yield Check(test, reason, (name, of), "last")


def _multiple_of(value: Mapping[str, int], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, factor in value.items():
        _number(factor, "multiple_of", 1)
        test = f"({name}.shape and {name}.shape[-1] % {factor:d} == 0)"
        reason = f'f"{name} has shape {{tuple({name}.shape)}}, its last dimension must be a multiple of {factor:d}"'
        yield Check(test, reason, (name,), "last")


def _max_last_dim(value: Any, tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, limit in _per_parameter(value, tensors, "max_last_dim").items():
        _number(limit, "max_last_dim", 0)
        reason = f'f"{name} has shape {{tuple({name}.shape)}}, its last dimension may be at most {limit:d}"'
        yield Check(f"({name}.shape and {name}.shape[-1] <= {limit:d})", reason, (name,), "last")


def _one_element(value: tuple[str, ...], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name in value:
        reason = f'f"{name} has shape {{tuple({name}.shape)}}, needs one element"'
        yield Check(f"{name}.numel() == 1", reason, (name,), "sizes")


def _one_of(value: Mapping[str, Iterable[Any]], tensors: tuple[str, ...]) -> Iterable[Check]:
    for name, choices in value.items():
        allowed = _many(choices)
        if not allowed or not all(
            choice is None or (isinstance(choice, (int, float, str)) and repr(choice) not in _NO_LITERALS)
            for choice in allowed
        ):
            raise ConditionError(f"ir.supports(one_of=...): expected numbers or words for {name!r}, got {choices!r}.")
        reason = f'f"{name} is {{{name}!r}}, needs one of " + {", ".join(map(repr, allowed))!r}'
        yield Check(f"{name} in {allowed!r}", reason, (name,), "kind")


_BY_NAME = ("same_dtype", "none", "contiguous", "row_contiguous", "same_shape", "one_element")
_NO_LITERALS = ("inf", "-inf", "nan")
_BUILDERS: Mapping[str, Callable[[Any, tuple[str, ...]], Iterable[Check]]] = {
    "dtype": _dtype,
    "same_dtype": _same_dtype,
    "none": _none,
    "contiguous": _contiguous,
    "row_contiguous": _row_contiguous,
    "ndim": _ndim,
    "same_shape": _same_shape,
    "last_dim_of": _last_dim_of,
    "multiple_of": _multiple_of,
    "max_last_dim": _max_last_dim,
    "one_element": _one_element,
    "one_of": _one_of,
}
