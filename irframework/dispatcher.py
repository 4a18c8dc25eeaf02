"""The generated `__call__` of an op.

A call must be nearly free, so for each op one small Python function is generated with the op's exact signature: it
checks what could make the plain path wrong, asks only the candidates that are statically possible, in order, with
declared conditions inlined, and calls the chosen function directly. It is made at the first call after a change and
kept per set of context priorities. Whatever is unusual (tracing, subclasses, gradients, other devices, mistakes) goes
to `execution.unusual`.

Owns making that function and putting it in place; its text is written by `dispatcher_text.py`.

Private torch API used here (read in 2.11 and 2.13):
* `torch.utils._python_dispatch._is_in_torch_dispatch_mode`, torch's own flag for "a dispatch mode is active". It is one
  for all threads; when two threads leave modes in another order than they entered them, a mode may see the
  implementation's torch calls instead of the op. The results are the same.
* `torch._C._functorch.peek_interpreter_stack`: whether a torch.func transform is active. Asked only where it matters.
* Dynamo's attribute `_torchdynamo_inline`, which makes it trace one function in place of another, and its guard on the
  code of `type(op).__call__`, which sees that function too (`_SteadyCall`): swapping `__call__` for a new priority does
  not make compiled code recompile.
"""

from collections.abc import Callable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _python_dispatch

from irframework import autocast
from irframework.codegen import compile_function
from irframework.decision import Rejected
from irframework.dispatcher_text import Writer, with_self
from irframework.known_calls import KnownCalls, known_from
from irframework.registry import registry

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_PATIENCE = 8  # calls that a dispatcher sees before it learns the class of the next; doubled each time it learns
_MOST_KNOWN = 2  # classes that a dispatcher knows: a call of none is asked about each


class _SteadyCall(type):
    """Class of an op's class: who reads `__call__` from that class is shown the function that Dynamo traces.

    Dynamo guards on the code of `type(op).__call__`. Each generated dispatcher has code of its own, so an eager call
    between two compiled ones would make Dynamo compile again. A call of the op itself does not come by here: Python
    takes `__call__` from the class's dictionary.
    """

    def __getattribute__(cls, name: str) -> Any:
        if name == "__call__":
            traced = type.__getattribute__(cls, "__dict__").get("_traced_call")
            if traced is not None:
                return traced
        return type.__getattribute__(cls, name)


def class_of(base: type[Any]) -> type[Any]:
    """Return a new subclass of `base` for one op, whose `__call__` is replaced by generated ones."""
    return _SteadyCall(base.__name__, (base,), {"__module__": base.__module__})


def reset(op: "IrOp") -> None:
    """Forget the generated dispatchers of an op; each is made anew at its next call."""
    for form, donated in ((op, False), (op.maybe_inplace, True)):
        if form.torch_op is not None:
            if form.first_call is None:
                form.first_call = _first_call(op, form, donated)
            form.generated = {}
            put_in_place(form, form.first_call)


def put_in_place(form: Any, function: Callable[..., Any]) -> None:
    """Make a generated function the `__call__` of an op, or of its `maybe_inplace` form."""
    form_class: Any = type(form)
    form_class.__call__ = function


def _first_call(op: "IrOp", form: Any, donated: bool) -> Callable[..., Any]:
    """Return the `__call__` that is in place while no dispatcher was generated."""
    from irframework.execution import other_context

    source = f"def __call__({with_self(op)}):\n    return _other_context(_op, _donated, {op.parameters.together})\n"
    scope = {**op.parameters.defaults, "_other_context": other_context, "_op": op, "_donated": donated}
    function = compile_function("__call__", source, scope)
    function._torchdynamo_inline = _traced_call(op, form)  # type: ignore[attr-defined]
    return function


def _traced_call(op: "IrOp", form: Any) -> Callable[..., Any]:
    """Return what Dynamo traces instead of any generated `__call__`: the torch op, as one opaque node."""
    form_class: Any = type(form)
    if "_traced_call" not in vars(form_class):
        result = f"_torch_op({op.parameters.passed})"
        source = f"def traced_call({with_self(op)}):\n"
        if op.optional_outputs:
            absent = [op.optional_outputs.get(index) for index in range(op.num_outputs)]
            shown = [
                f"_y[{i}]" if name is None else f"None if {name} is None else _y[{i}]" for i, name in enumerate(absent)
            ]
            source += f"    _y = {result}\n"
            result = f"({', '.join(shown)})"
        source += f"    return {result}\n"
        scope = {**op.parameters.defaults, "_torch_op": form.torch_op}
        form_class._traced_call = compile_function("traced_call", source, scope)
    traced: Callable[..., Any] = vars(form_class)["_traced_call"]
    return traced


def generate(
    op: "IrOp",
    donated: bool,
    context: Any,
    branches: list[tuple[str, list["IrOpImpl"]]],
    known: tuple[KnownCalls, ...] = (),
    patience: int = _PATIENCE,
) -> None:
    """Generate a dispatcher and put it in place.

    Args:
        op: The op.
        donated: Whether it is for `maybe_inplace`.
        context: The context priorities that it is for; it hands calls under other ones to `other_context`.
        branches: Per device type the implementations that may be chosen, best first; the last accepts everything.
        known: Classes of calls that it looks for first.
        patience: After how many calls of no known class it learns that of the next one.
    """
    from irframework import dispatch, execution
    from irframework.priority import current_context

    def learn(candidates: int, args: tuple[Any, ...]) -> None:
        if not execution.transformed():
            found = known_from(op, donated, args, candidates, branches[candidates][1])
            with registry.lock:
                if form.generated.get(context) is function:  # nothing was registered meanwhile
                    latest = known if found is None else (found, *known)[:_MOST_KNOWN]
                    generate(op, donated, context, branches, latest, 2 * patience)

    form = op.maybe_inplace if donated else op
    writer = Writer(op, donated)
    source = writer.dispatcher(branches, known)
    scope = {
        **writer.scope,
        **op.parameters.defaults,
        "_CONTEXT": context,
        "_op": op,
        "_learn": learn,
        "_missed": chain(repeat(False, patience), (True,), repeat(False)).__next__,
        "_current_context": current_context,
        "_other_context": execution.other_context,
        "_unusual": execution.unusual,
        "_own_outputs": execution.own_outputs,
        "_refused": execution.refused,
        "_check_values": op.value_check,
        "_note_written": execution.note_written,
        "_increment_version": execution.increment_version,
        "_inference_mode": torch.is_inference_mode_enabled,
        "_predicate_raised": dispatch.predicate_raised,
        "_modes": _python_dispatch,
        "_transform": torch._C._functorch.peek_interpreter_stack,
        "_forward_ad": torch.autograd.forward_ad,
        "_shares_storage": execution.shares_storage,
        "_grad_enabled": torch.is_grad_enabled,
        "_autocast": autocast.is_active,
        "_contiguous_format": torch.contiguous_format,
        "_Tensor": Tensor,
        "_Dtype": torch.dtype,
        "_Parameter": Parameter,
        "_Rejected": Rejected,
    }
    function = compile_function("__call__", source, scope)
    function._torchdynamo_inline = _traced_call(op, form)  # type: ignore[attr-defined]
    form.generated[context] = function
    put_in_place(form, function)
