"""Chains that fusions find: statements for random programs.

Owns the forms. Each is a standard op, or one of the fuzzer's own, as one call or spelt out in torch; chains put them
one behind the other. What breaks a chain is drawn in between: another reader of what it computes on the way, a write,
a view, a conversion, and forms that are nearly the pattern. Names that a chain defines are open to all other
statements, which read and overwrite them, too. Who runs the fused ops is in `fused_ops.py`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch
from programs import Step, Writer

_F = "torch.nn.functional"


@dataclass(frozen=True, slots=True)
class Form:
    """One part of a chain.

    Attributes:
        lines: Expressions; `{0}` is what the first one computes. All but the last compute one tensor.
        count: How many tensors the last one computes.
        goes_on: Which of them the next part is given; None: it is given what this one was.
        donates: Whether it gives away x and b.
    """

    lines: tuple[str, ...]
    count: int = 1
    goes_on: int | None = 0
    donates: bool = False


def _forms(*forms: str | tuple[str, ...] | Form) -> tuple[Form, ...]:
    return tuple(f if isinstance(f, Form) else Form((f,) if isinstance(f, str) else f) for f in forms)


_SQUARES = "{0}.pow(2).mean(-1, keepdim=True)"
_HALVES = ("{x}[..., :{h}]", "{x}[..., {h}:]")
_TO_CODES = ".clamp(-448.0, 448.0).to(torch.float8_e4m3fn)"
FAMILIES: dict[str, tuple[Form, ...]] = {
    "add": _forms("{x} + {b}", "{b} + {x}", "torch.add({x}, {b})", "{x} + {x}"),
    "norm": _forms(
        "norm({x}, {w}, {e})",
        "norm(weight={w}, epsilon={e}, x={x})",
        "norm({x}, None, {e})",
        "norm({x}, {w}, {e}, {h})",
        ("{x}.to({wide})", _SQUARES, "{0} * torch.rsqrt({1} + {e})", "{w} * {2}.to({d})"),
        ("{x}.to({wide})", "({0} * {0}).mean(-1, keepdim=True)", "torch.rsqrt({1} + {e})", "({0} * {2}).to({d}) * {w}"),
        ("{x}.to({wide})", _SQUARES, "({0} * torch.rsqrt({1} + {e})).to({d})"),
        (
            "{x}.to({wide})",
            "{0}[..., :{h}].pow(2).mean(-1, keepdim=True)",
            "{0} * torch.rsqrt({1} + {e})",
            "{2}.to({d}) * {w}",
        ),
        _F + ".rms_norm({x}, ({n},), {w}, {e})",
    ),
    "gemma": _forms(
        "gemma({x}, {w}, {e})",
        ("{x}.to({wide})", _SQUARES, "{0} * torch.rsqrt({1} + {e})", "({2} * (1.0 + {w}.to({wide}))).to({d})"),
        ("{x}.to({wide})", _SQUARES, "1.0 + {w}.to({wide})", "({2} * ({0} * torch.rsqrt({1} + {e}))).to({d})"),
    ),
    "added norm": _forms(
        Form(("fused_norm({x}, {b}, {w}, {e})",), 2),
        Form(("fused_norm.maybe_inplace({x}, {b}, {w}, {e})",), 2, donates=True),
        Form(("added_gemma.maybe_inplace({x}, {b}, {w}, {e})",), 2, donates=True),
    ),
    "gate": _forms(
        "gate({x})",
        "gelu_gate({x})",
        "gelu_gate({x}, 'tanh')",
        (*_HALVES, _F + ".silu({0})", "{2} * {1}"),
        (*_HALVES, "{1} * " + _F + ".silu({0})"),
        ("{x}.chunk(2, -1)[0]", "{x}.chunk(2, -1)[1]", _F + ".gelu({0}) * {1}"),
        (*_HALVES, _F + ".gelu({0}, approximate='tanh')", "{1} * {2}"),
    ),
    "codes": _forms(
        "quant_static({x}, {s})",
        ("{x}.to({wide}) * (1.0 / {s})", "{0}" + _TO_CODES),
        Form(("quant_dynamic({x})",), 2),
        (
            "{x}.to({wide})",
            "({0}.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1 / 229376)",
            "({0} * (1.0 / {1}))" + _TO_CODES,
        ),
        Form(("quant_group({x}, {h})",), 2),
        Form(("quant_group({x}, {h}, True)",), 2),
        Form(("quant_group({x}, {h}, power_of_two_scales=True)",), 2),
        (
            "{x}.to({wide}).reshape(*{x}.shape[:-1], 2, {h})",
            "({0}.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1 / 229376)",
            "({0} * (1.0 / {1}))" + _TO_CODES + ".reshape({x}.shape)",
        ),
    ),
    "rotary": _forms(  # copies of the table, which other programs read: names for its parts could be written to
        (
            "{x}.reshape(1, {t}, 2, {h})",
            "table[:{t}, :{h}].to({d})[None, :, None].clone()",
            "table[:{t}, 8 : 8 + {h}].to({d})[None, :, None].clone()",
            "{0} * {1} + torch.cat((-{0}[..., {q}:], {0}[..., :{q}]), -1) * {2}",
            "{3}.reshape({t}, {n})",
        ),
        (
            "{x}.reshape(1, {t}, 2, {h}).transpose(1, 2)",
            "table[:{t}, :{h}][None, None].clone()",
            "table[:{t}, 8 : 8 + {h}][None, None].clone()",
            "({0} * {1}) + (torch.cat((-{0}[..., {q}:], {0}[..., :{q}]), -1) * {2})",
            "{3}.to({d}).transpose(1, 2).reshape({t}, {n})",
        ),
    ),
    "squash": _forms("squash({x}, {f})", "squash({x})", "squash(factor={f}, x={x})"),
    "shift": _forms("shift({x}, {w})", "shift(by={w}, x={x})"),
    "peak": _forms(Form(("peak({x})",), 2), Form(("peak({x})",), 2, goes_on=1)),
    "crest": _forms(Form(("{x}.amax(-1, keepdim=True)",), goes_on=None)),
    "unrounded": _forms(  # between the parts, where an op rounds
        ("{x}.to({wide})", _SQUARES, "{0} * torch.rsqrt({1} + {e})"),
        ("{x}.to({wide})", _SQUARES, "{0} * torch.rsqrt({1} + {e}) * {w}.to({wide})"),
        ("{x}.to({wide})", _F + ".silu({0}[..., :{h}]) * {0}[..., {h}:]"),
        ("{x}.to({wide})", "{0} + {b}.to({wide})"),
    ),
    "center": _forms(
        ("{x}.mean(-1, keepdim=True)", "({x} - {0}) * {w} * {f}"),
        Form(("center({x}, {w}, {f})",), 2),
    ),
    "whole": _forms(
        "squash_shift({x}, {f}, {w})",
        Form(("add_squash_peak({x}, {b}, {f})",), 3),
        Form(("add_squash_peak.maybe_inplace({x}, {b}, {f})",), 3, donates=True),
    ),
}
# Families in a row: what a chain is made of. Each holds at least one pattern.
PLANS = (
    *(("norm",), ("gemma",), ("gate",), ("center",), ("rotary",)),
    *(("add", "norm"),) * 3,
    *(("add", "gemma"), ("add", "norm", "gate"), ("norm", "gate"), ("gate", "norm")),
    *(("norm", "codes"),) * 2,
    *(("add", "norm", "codes"),) * 4,
    *(("added norm", "codes"),) * 2,
    *(("gate", "codes"),) * 3,
    *(("codes",), ("add", "norm", "gate", "codes"), ("norm", "norm", "codes")),
    *(("squash", "shift"),) * 3,
    *(("crest", "squash", "shift"), ("unrounded", "codes"), ("unrounded", "norm"), ("add", "unrounded", "codes")),
    *(("add", "squash", "peak"),) * 3,
    *(("squash", "shift", "squash", "shift"), ("add", "squash", "shift"), ("whole", "squash", "shift")),
    ("whole", "norm"),
    *(("add", "norm", "squash", "shift"), ("norm", "squash", "shift", "codes"), ("center", "squash", "shift")),
)  # fmt: skip
BETWEEN = (
    "{x}.view(-1, {n})",
    "{x}.reshape(-1, {n})",
    "{x}.unsqueeze(0)",
    "{x}.reshape(2, -1, {n})",
    "{x}.transpose(0, -1)",
    "{x}.transpose(0, 1).contiguous()",
    "{x}.clone()",
    "{x}.contiguous()",
    "{x}[:2]",
    "{x}[..., :{h}]",
    "{x}.to({d})",
    "{x}.float()",
    "{x} * 1",
    "{x}.view({x}.shape)",
)
TWICE = ("{x} * 2", "{x}.to({wide})", "torch.tanh({x})", "{x} + {b}", "norm({x}, {w}, {e})", "squash({x})")
READERS = ("{y} * 0.5", "torch.sin({y})", "{y}.sum(-1, keepdim=True) * 0.1", "{y}[:1] + 1", "{y}.t()", "{y}.view(-1)")
WRITES = (
    "{y}.mul_(0.5)",
    "{y}.add_(1)",
    "{y}[:1].zero_()",
    "{y}[..., 0] = 0.5",
    "{y}.copy_({z})",
    "torch.sin({z}, out={y})",
    "user.poke_({y})",
)
# Graphs go on with what `x.mul_()` returns; these leave x in them, and overwrite its memory all the same.
HIDDEN_WRITES = (
    "{y}[:1].zero_()",
    "{y}[..., 0] = 0.5",
    "{y}[1:].mul_(0.5)",
    "{y}.view(-1).add_(1)",
    "user.poke_({y}[:2])",
)
# What makes a pattern a near miss, or the same with another number.
MISSES = (
    ("-1, keepdim=True", "0, keepdim=True"),
    ("pow(2)", "pow(4)"),
    ("rsqrt", "sqrt"),
    ("448.0)", "440.0)"),
    ("/ 448.0", "/ 440.0"),
    ("silu", "sigmoid"),
    ("silu", "gelu"),
    ("[..., :{h}]", "[..., {h}:]"),
    ("[..., {h}:]", "[..., :{h}]"),
    (":{q}]", "{q}:]"),
    ("{w}", "({w} + 0.5)"),
    ("{w}", "{w}.double()"),
    ("{x}", "{b}"),
    ("{0}", "{x}"),
    (".to({wide})", ""),
    (".to({d})", ""),
    ("1.0 +", "1.5 +"),
    ("1.0 /", "1.5 /"),
    ("({x} - {0})", "({0} - {x})"),
    ("'tanh'", "'none'"),
    ("-{0}", "{0}"),
)


def chain(writer: Writer, step: Step) -> None:
    """Up to four parts in a row, each of which reads the last, and what may break them."""
    _Chain(writer, random.Random(repr((step.a, step.b, step.c)))).write(writer.pick(step.a))


class _Chain:
    def __init__(self, writer: Writer, draw: random.Random) -> None:
        self.writer, self.draw = writer, draw
        self.names: dict[str, object] = {}

    def write(self, name: str) -> None:
        draw, writer = self.draw, self.writer
        plan = draw.choice(PLANS)
        x, missed = name, False
        careful = draw.random() < 0.45  # nothing breaks it on purpose
        if not careful and draw.random() < 0.2:
            x = self._again(x)
        for number, family in enumerate(plan):
            if not self._look_at(x, family):
                return
            form = draw.choice(FAMILIES[family])
            near = not careful and draw.random() < 0.2
            missed = missed or near
            found = self._form(form, near, careful)
            if found is None:
                return
            writer.calls += 1
            if form.donates:
                writer.donate([writer.scope[str(self.names[each])] for each in "xb"])
            x = x if form.goes_on is None else found[form.goes_on]
            last = number == len(plan) - 1
            if last or form.goes_on is None or draw.random() < 0.2:
                writer.results += found
            if writer.scope[x].dtype == torch.float8_e4m3fn:
                return self._end(missed)
            if not last and draw.random() < (0.1 if careful else 0.3):
                self._look_at(x, family)
                if writer.define(draw.choice(BETWEEN).format(**self.names)):
                    x = writer.alive[-1]
        return self._end(missed)

    def _again(self, x: str) -> str:
        """Compute something twice, with a write in between or with none."""
        draw, writer = self.draw, self.writer
        if not self._look_at(x, "again"):
            return x
        text = draw.choice(TWICE).format(**self.names)
        if writer.define(text):
            first = writer.names[-1]
            if draw.random() < 0.7 and writer.may_write(x):
                writer.run(draw.choice(HIDDEN_WRITES).format(y=x))
            if writer.define(text):
                if draw.random() < 0.5:
                    writer.results.append(first)
                return writer.names[-1]
        return x

    def _end(self, missed: bool) -> None:
        self.writer.chains += not missed

    def _look_at(self, x: str, family: str) -> bool:
        """Name what the forms speak of."""
        writer, draw = self.writer, self.draw
        value = writer.scope.get(x)
        if x not in writer.alive or value is None or value.dim() < 2:
            return False
        n = value.shape[-1]
        if not 2 <= n <= 16 or n % 2 or (family == "rotary" and (n % 4 or n > 16 or value.dim() != 2)):
            return False
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        self.names = {"x": x, "b": writer.partner(x, draw.randrange(60)), "n": n, "h": n // 2, "q": max(n // 4, 1)}
        self.names |= {
            "d": value.dtype,
            "wide": wide,
            "t": value.shape[0],
            "f": draw.choice((0.5, 0.5, 0.5, 0.5, 2.0, 1.0)),
        }
        self.names |= {
            "e": draw.choice((0.5, 0.5, 0.5, 0.5, 0.5, 1e-3)),
            "s": draw.choice(("scales[0]", "scales[1:2]", "scales[2]")),
        }
        self.names["w"] = self._weight(value, x)
        return True

    def _weight(self, value: torch.Tensor, x: str) -> str:
        number, length = self.draw.random(), value.shape[-1]
        if number < 0.08 and value.dim() == 2:
            return f"{self.names['b'] if number < 0.04 else x}[0]"  # it may depend on what a fused op would compute
        own = self.writer.scope["w"].dtype == value.dtype
        if number < 0.2:
            return f"w[:{length}].float()"
        return f"w[:{length}]" if own or number > 0.92 else f"w[:{length}].to({value.dtype})"

    def _form(self, form: Form, near: bool, careful: bool) -> list[str] | None:
        """Write the lines of a form: all as one expression, or with names for what is computed on the way."""
        draw, writer = self.draw, self.writer
        lines = list(form.lines)
        if near:
            places = [
                (i, old, new) for i, line in enumerate(lines) for old, new in MISSES if old in line and old != new
            ]
            if places:
                index, old, new = draw.choice(places)
                lines[index] = lines[index].replace(old, new, 1)
        named = draw.random() < (0.15 if careful else 0.55)
        own: list[str] = []
        for index, line in enumerate(lines):
            text = re.sub(r"\{(\d)\}", lambda found: own[int(found[1])], line).format(**self.names)
            last = index == len(lines) - 1
            if not last and not named:
                own.append(f"({text})")
                continue
            count = form.count if last else 1
            if not writer.define(text, count):
                return None
            if last:
                return writer.names[-count:]
            own.append(writer.names[-1])
            if not careful and draw.random() < 0.3:
                self._disturb(own[-1])
                if any(name not in writer.alive for name in own if not name.startswith("(")):
                    return None
        return None

    def _disturb(self, name: str) -> None:
        """Another reader of what was computed, or a write to it, to what it was computed from, or to anything."""
        draw, writer = self.draw, self.writer
        if draw.random() < 0.5:
            if writer.define(draw.choice(READERS).format(y=name)) and draw.random() < 0.6:
                writer.results.append(writer.names[-1])
            return
        y = draw.choice((name, str(self.names["x"]), str(self.names["b"]), writer.pick(draw.randrange(60))))
        if y in writer.alive and writer.may_write(y):
            form = draw.choice(WRITES)
            if "user" in form and writer.is_part_of_offset_argument(y):
                return
            writer.run(form.format(y=y, z=writer.partner(y, draw.randrange(60))))
