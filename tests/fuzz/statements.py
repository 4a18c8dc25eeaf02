"""The statements of random programs: for each kind of step, the forms that it may take.

Owns the forms. What names are alive, and what a donation does to them, is `programs.py`'s. Values stay small, and no
form has a jump: a difference in the last bit must not grow into one that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusable import chain
from programs import Step, Writer
from providers import priorities

POINTWISE = (
    "{a} + {b}",
    "torch.tanh({a})",
    "{a} * 1",
    "{a}.clone()",
    "{a} + 0",
    "{a} * {b} * 0.5",
    "{a}.sin()",
    "torch.maximum({a}, {b})",
    "{a} - {b} * 0.5",
    "{a}.contiguous()",
    "{a}.to({a}.dtype)",
    "{a}.float()",
    "{a}.double()",
    "torch.sigmoid({a})",
    "{a}.clone(memory_format=torch.contiguous_format)",
    "torch.zeros_like({a}) + {b}",
)
OTHER = (
    "torch.cat(({a}, {b}))",
    "torch.cat(({a}[:1], {b}[1:]))",
    "torch.cat(({a}, {b}), -1)",
    "torch.stack(({a}, {b}))",
    "({a} @ {b}.transpose(-1, -2)) * 0.1",
    "torch.mm({a}, {b}.t()) * 0.1",
    "torch.nn.functional.linear({a}, {b}) * 0.1",
    "{a}.mean(-1, keepdim=True) + {b}",
    "{a}.sum(0) * 0.25",
    "torch.softmax({a}, -1)",
    "{a}.cumsum(0) * 0.25",
    "{a}.logsumexp(-1)",
    "torch.nn.functional.layer_norm({a}, {a}.shape[-1:], eps=0.5)",
)
VIEWS = (
    "{a}.reshape(-1)",
    "{a}.view(-1)",
    "{a}[:{k}]",
    "{a}[{k}:]",
    "{a}[..., :{h}]",
    "{a}[..., {h}:]",
    "{a}[..., ::2]",
    "{a}.transpose(0, -1)",
    "{a}.t()",
    "{a}.unsqueeze(0)",
    "{a}.squeeze(0)",
    "{a}.detach()",
    "{a}[{k}]",
    "{a}.select(-1, {k})",
    "{a}.reshape({h}, -1)",
    "{a}.view(-1, {h})",
    "{a}.flatten()",
    "{a}.unflatten(-1, (2, -1))",
    "{a}.expand(2, *{a}.shape)",
    "{a}.view(torch.int32).view(torch.float32)",
    "{a}.view(torch.int64).view(torch.float64)",
    "{a}.as_strided({a}.shape, {a}.stride())",
    "{a}.as_strided((2, 3), (4, 1), {a}.storage_offset() + {k})",
    "{a}.as_strided((2, 3), (4, 1))",
    "{a}.diagonal()",
    "{a}.narrow(0, 1, {k})",
    "{a}.split({h}, -1)[1]",
    "{a}.chunk(2)[1]",
    "{a}.unbind()[1]",
    "{a}.split({k})[0]",
    "{a}.view_as({a})",
    "{a}.movedim(0, -1)",
)
AS_STRIDED_FAULT = ZERO_FAULT = torch.__version__.startswith("2.11.")
INEXACT = {"twice", "vllm_c"}  # providers that round otherwise than native
PAIRS = ("{a}.chunk(2)", "{a}.chunk(2, -1)", "{a}.split({h}, -1)", "{a}.unbind()", "torch.split({a}, [1, {k}])")
WRITES = (
    "{a}.mul_(0.5)",
    "{a}.add_({b})",
    "{a}.copy_({b})",
    "{a}[:1].add_(1)",
    "{a}[..., 0] = 0.5",
    "{a}[..., :{h}] = {b}[..., :{h}]",
    "{a}[{k}:] = {b}[{k}:] * 0.5",
    "torch.add({a}, 1, out={b})",
    "torch.sin({a}, out={b})",
    "torch.mul({a}, 0.5, out={a})",
    "{a}.zero_()",
    "{a}.tanh_()",
    "{a} += 1",
    "{a}.view(-1)[::2].mul_(0.5)",
    "{a}.t().add_(1)",
    "{a}.fill_(0.25)",
    "{a}[0].copy_({b}[-1])",
    "{a}.clamp_(-1, 1)",
    "{a}.view(torch.int32).bitwise_xor_(-2147483648)",
    "{a}.detach().mul_(0.5)",
    "{a}.transpose(0, -1).sub_(0.5)",
    "torch.cat(({a}[:1], {b}[1:]), out={b})",
)
USER = ("user.poke_({a})", "user.blend_({a}, {b})", "user.poke_({a}[:{k}])", "user.blend_({a}[..., :{h}], {b})")
OPERANDS = (
    "{a}",
    "{a}",
    "{a}[:{k}]",
    "{a}.t()",
    "{a}.view(-1)",
    "{a}.reshape(-1, {h})",
    "{a}[..., :{h}]",
    "{a}.unsqueeze(0)",
    "{a}.clone()",
    "({a} * 1)",
    "({a} + 0)",
    "{a}.detach()",
    "{a}.chunk(2)[0]",
    "{a}.tanh()",
    "{a}.view_as({a})",
)


def _names(writer: Writer, step: Step) -> dict[str, object]:
    a = writer.pick(step.a)
    shape = writer.scope[a].shape
    return {
        "a": a,
        "b": writer.partner(a, step.b),
        "k": 1 + step.b % 3,
        "h": max(shape[-1] // 2, 1) if shape else 1,
    }


def _of(forms: tuple[str, ...], step: Step) -> str:
    return forms[step.c % len(forms)]


def _pointwise(writer: Writer, step: Step) -> None:
    form = _of(POINTWISE, step)
    if "zeros_like" in form and any(each.kind == "break" for each in writer.program.steps):
        return  # a fault of torch, also without IR ops: `test_torch_faults.py` shows it
    writer.define(form.format(**_names(writer, step)))


def _other(writer: Writer, step: Step) -> None:
    writer.define(_of(OTHER, step).format(**_names(writer, step)))


def _view(writer: Writer, step: Step) -> None:
    form, names = _of(VIEWS, step), _names(writer, step)
    without_offset = ".as_strided(" in form and "{k}" not in form
    if AS_STRIDED_FAULT and without_offset and writer.scope[str(names["a"])].storage_offset():
        return  # a fault of torch, also without IR ops: `test_torch_faults.py` shows it
    if "torch.int64" in form and INEXACT & {names[0] for names in priorities(writer.program.providers).values()}:
        return  # the last bits of two numbers would become the exponent of one
    writer.define(form.format(**names))


def _pair(writer: Writer, step: Step) -> None:
    writer.define(_of(PAIRS, step).format(**_names(writer, step)), count=2)


def _write(writer: Writer, step: Step) -> None:
    names, form = _names(writer, step), _of(WRITES, step)
    if ZERO_FAULT and "zero_" in form and not writer.scope[str(names["a"])].is_contiguous():
        return  # a fault of torch, also without IR ops: `test_torch_faults.py` shows it
    if writer.may_write(str(names["a"])) and writer.may_write(str(names["b"])):
        writer.run(form.format(**names))


def _user(writer: Writer, step: Step) -> None:
    names = _names(writer, step)
    if not writer.may_write(str(names["a"])) or any(writer.scope[str(names[n])].requires_grad for n in "ab"):
        return  # what a custom op without a backward does to gradients is not defined
    if writer.is_part_of_offset_argument(str(names["a"])):
        return
    line = _of(USER, step).format(**names)
    if "blend" in line:
        writer.define(line)
    else:
        writer.run(line)


def _look(writer: Writer, step: Step) -> None:
    """The sizes of a tensor may be asked, also after it was donated."""
    asked = writer.dead[step.b % len(writer.dead)] if writer.dead else writer.pick(step.b)
    writer.define(f"{writer.pick(step.a)} * ({asked}.shape[0] * 0.1)")


def _break(writer: Writer, step: Step) -> None:
    if writer.run("torch._dynamo.graph_break()"):
        writer.breaks += 1


def _weight(writer: Writer, like: torch.Tensor, number: int) -> str:
    """A vector as long as a row: the weights, a part of them, or a value of the program."""
    length = like.shape[-1]
    found = [n for n in writer.alive if writer.scope[n].shape == (length,) and writer.scope[n].dtype == like.dtype]
    if found and number % 2:
        return found[number // 2 % len(found)]
    return f"w[:{length}]" if like.dtype == writer.scope["w"].dtype else f"w[:{length}].to({like.dtype})"


def _operand(writer: Writer, name: str, form: str, step: Step) -> tuple[str, torch.Tensor]:
    text = form.format(a=name, k=1 + step.b % 3, h=max(writer.scope[name].shape[-1] // 2, 1))
    return text, writer.value(text)


def _second(writer: Writer, first: torch.Tensor, text: str, step: Step) -> tuple[str, torch.Tensor]:
    """Another operand of the same shape: another value, the same again, or a view of it."""
    number = step.b
    if number % 7 == 6:
        return text, first
    if number % 7 == 5:
        return (view := f"{text}.view({text}.shape)"), writer.value(view)
    name = writer.partner_of(first, number)
    if name is not None:
        return name, writer.scope[name]
    fresh = f"torch.sin({text})"
    return fresh, writer.value(fresh)


def _call(writer: Writer, step: Step) -> None:
    _ir_op(writer, step, donated=False)


def _donate(writer: Writer, step: Step) -> None:
    _ir_op(writer, step, donated=True)


def _ir_op(writer: Writer, step: Step, donated: bool) -> None:
    try:
        text, first = _operand(writer, writer.pick(step.a), OPERANDS[(step.c // 4) % len(OPERANDS)], step)
        kind = step.c % 4
        if kind < 2:
            other, second = _second(writer, first, text, step)
            weight = _weight(writer, first, step.b)
            line, count = _two_activations(text, other, weight, donated, step, standard=kind == 1), 2
            activations = [first, second]
        else:
            line, count = f"scale{'.maybe_inplace' if donated else ''}{_scale_arguments(text, step)}", 1
            activations = [first]
        if kind == 3 and not donated:
            line, count = _functional_op(writer, text, first, step)
    except Exception:
        return
    if writer.define(line, count):
        writer.calls += 1
        if donated:
            writer.donate(activations)


def _two_activations(a: str, b: str, weight: str, donated: bool, step: Step, standard: bool) -> str:
    form = ".maybe_inplace" if donated else ""
    if standard:
        return f"fused_norm{form}({a}, {b}, {weight}, 0.5)"
    if step.b % 3 == 2:
        return f"add{form}(weight={weight}, x_residual={b}, x={a})"
    return f"add{form}({a}, {b}, {weight})"


def _scale_arguments(a: str, step: Step) -> str:
    return (f"({a})", f"({a}, 0.5)", f"(x={a}, factor=1.0)", f"({a}, factor=-1.5)")[step.b % 4]


def _functional_op(writer: Writer, a: str, first: torch.Tensor, step: Step) -> tuple[str, int]:
    form = step.b % 4
    if form == 0:
        return f"norm({a}, {_weight(writer, first, step.b // 4)}, 0.5)", 1
    if form == 1:
        return f"gate({a})", 1
    if form == 2:
        return f"spread({a})", 3
    head = first.shape[-1] // 2 * 2
    positions = f"torch.arange({a}.shape[0], device={a}.device)"
    other, _ = _second(writer, first, a, Step(step.kind, step.a, step.b // 4, step.c))
    return f"rotate({positions}, {a}, {other}, table[:, :{head}].to({a}.dtype), {head})", 2


STATEMENTS: dict[str, Callable[[Writer, Step], None]] = {
    "pointwise": _pointwise,
    "other": _other,
    "view": _view,
    "pair": _pair,
    "write": _write,
    "user": _user,
    "look": _look,
    "break": _break,
    "call": _call,
    "donate": _donate,
    "chain": chain,
}
# How often each kind is drawn.
KINDS = (
    *("pointwise",) * 4,
    *("other",) * 2,
    *("view",) * 5,
    "pair",
    *("write",) * 3,
    "user",
    "look",
    *("call",) * 6,
    *("donate",) * 7,
)
KINDS_WITH_BREAKS = (*KINDS, "break")
_KINDS_FUSABLE = (
    *("chain",) * 9,
    *("pointwise",) * 3,
    *("view",) * 3,
    *("write",) * 3,
    *("call",) * 2,
    *("donate",) * 2,
    *("other", "pair", "user", "look"),
)
# How programs are drawn that fusions are to be found in: few for training, where nothing is fused, and of any size.
FUSABLE: dict[str, Any] = {
    "kinds": _KINDS_FUSABLE,
    "max_steps": 5,
    "must": "chain",
    "dtypes": (*("float32",) * 4, *("bfloat16",) * 2, "float16", "float64"),
    "modes": (*("no_grad",) * 190, *("inference_mode",) * 9, "training"),
    "shapes": (*("static",) * 198, "dynamic", "marked"),
}
