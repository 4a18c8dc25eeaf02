"""Random programs of IR ops, torch ops, views, mutations and donations: compiled equals eager native, inputs included.

A program is drawn with a seed that a failure prints. It obeys the rule that a donated tensor is not used again.
"""

import random

import pytest
import torch
from compiler_support import lowered

import irframework as ir
from irframework.op import IrOp

PROVIDERS = ("native", "inp", "aten", "nested", "fresh")


class Program:
    """Draws the source of one function over x0.. and w, keeping track of which names share memory."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.inputs = self.draw.randint(1, 3)
        self.lines: list[str] = []
        self.alive = [f"x{i}" for i in range(self.inputs)]
        self.group = {name: {name} for name in self.alive}
        self.donated: set[str] = set()
        self.count = 0
        for _ in range(self.draw.randint(2, 9)):
            self.step()
        results = self.draw.sample(self.alive, min(len(self.alive), self.draw.randint(1, 3))) or ["w * 2"]
        arguments = ", ".join([f"x{i}" for i in range(self.inputs)] + ["w"])
        body = "\n".join(f"    {line}" for line in self.lines)
        self.source = f"def f({arguments}):\n{body}\n    return ({', '.join(results)},)\n"

    def new(self, expression: str, view_of: str | None = None) -> None:
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {expression}")
        self.group[name] = self.group[view_of] if view_of else set()
        self.group[name].add(name)
        self.alive.append(name)

    def step(self) -> None:
        if not self.alive:
            self.new("w * torch.ones(4, 8)")
        a, b = self.draw.choice(self.alive), self.draw.choice(self.alive)
        kind = self.draw.choice(("torch", "view", "write", "call", "call", "donate", "donate"))
        if kind == "torch":
            forms = (
                f"{a} + {b}",
                f"{a} * 1",
                f"{a}.clone()",
                f"torch.cat(({a}[:2], {b}[2:]))",
                f"{a}.t().contiguous().t()",
            )
            self.new(self.draw.choice(forms))
        elif kind == "view":
            self.new(self.draw.choice((f"{a}.reshape(4, 8)", f"{a}.unsqueeze(0)[0]", f"{a}.detach()")), a)
        elif kind == "write":
            self.lines.append(self.draw.choice((f"{a}.mul_(1.5)", f"{a}[:2].add_(1)")))
        else:
            name = f"t{self.count}"
            form = "op" if kind == "call" else "op.maybe_inplace"
            self.lines.append(f"{name} = {form}({a}, {b}, w)")
            if kind == "donate":
                gone = self.group[a] | self.group[b]
                self.donated |= gone
                self.alive = [other for other in self.alive if other not in gone]
            self.new(f"{name}[0]")
            self.new(f"{name}[1]")


class Reference:
    """The op as a torch function of its own."""

    def __init__(self, op: IrOp) -> None:
        self.op = op

    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.op.native(*(argument.clone() for argument in arguments))

    maybe_inplace = __call__


def provide(add) -> None:
    """Give the op implementations of every kind."""

    @add.op.register_impl("aten", inplace=True)
    def aten(x, x_residual, weight):
        x_residual.add_(x)
        x.copy_(x_residual)
        x.mul_(weight)
        return x, x_residual

    @add.op.register_impl("fresh")
    def fresh(x, x_residual, weight):
        y, r = torch.empty_like(x), torch.empty_like(x)
        y.copy_(x)
        r.copy_(x_residual)
        add.kernel(y, r, weight)
        return y, r

    inner = ir.register_op(name=f"{add.op.name}_inner", allow_inplace=True)(add.op.native)

    @inner.register_impl("inp", inplace=True)
    def inner_inp(x, x_residual, weight):
        add.kernel(x, x_residual, weight)
        return x, x_residual

    @add.op.register_impl("nested", inplace=True)
    def nested(x, x_residual, weight):
        return inner.maybe_inplace(x * 1, x_residual, weight)


def check(program: Program, add, provider: str, backend, dynamic: bool | None) -> None:
    inputs = [torch.randn(4, 8) for _ in range(program.inputs)]
    weight = torch.rand(8) + 0.5
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    scopes = ({"torch": torch, "op": Reference(add.op)}, {"torch": torch, "op": add.op})
    for scope in scopes:
        exec(program.source, scope)
    with torch.no_grad(), add.priority(provider):
        want = scopes[0]["f"](*theirs, weight)
        got = torch.compile(scopes[1]["f"], backend=backend, dynamic=dynamic)(*ours, weight)
    what = f"{provider}, dynamic={dynamic}\n{program.source}"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m: f"{m}\n{what}")
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if f"x{index}" not in program.donated:
            torch.testing.assert_close(a, b, msg=lambda m, index=index: f"input {index}: {m}\n{what}")


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_equal_eager_native(add, seed):
    provide(add)
    program = Program(seed)
    dynamic = True if seed % 6 == 0 else None
    check(program, add, PROVIDERS[seed % len(PROVIDERS)], lowered, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_random_programs_equal_eager_native_through_inductor(add, seed):
    provide(add)
    with torch._inductor.config.patch(fx_graph_cache=False):
        check(Program(seed), add, ("inp", "fresh")[seed % 2], "irframework", None)
