"""The faults of Inductor that `compiler/inductor_fault.py` corrects, shown in plain torch."""

import subprocess
import sys
import textwrap

import pytest
import torch

import irframework as ir

TOO_LATE = """
    import sys, torch
    library = torch.library.Library("fault", "DEF")
    library.define("fill_(Tensor(a!) out, Tensor x, Tensor w) -> ()")
    def fill(out, x, w):
        torch.mul(x, w, out=out)
    library.impl("fill_", fill, "CompositeExplicitAutograd")
    torch.library.register_fake("fault::fill_", lambda out, x, w: None, lib=library)
    def f(x, y, w):
        total = x + y
        first, second = torch.empty(4, 8), torch.empty(4, 8)
        torch.ops.fault.fill_(first, total * w, w)
        torch.ops.fault.fill_(second, x, w)
        return second * 1.5 + total, first
    arguments = torch.randn(4, 8), torch.randn(4, 8), torch.rand(8)
    if sys.argv[1] == "corrected":
        from irframework.compiler.inductor_fault import correct
        correct()
        correct()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        got, want = torch.compile(f)(*arguments), f(*arguments)
    print(all(torch.allclose(a, b) for a, b in zip(got, want)))
"""
TOO_EARLY = """
    import sys, torch
    library = torch.library.Library("fault", "DEF")
    library.define("halve_(Tensor(a!) x) -> ()")
    def halve(x):
        x.mul_(0.5)
    library.impl("halve_", halve, "CompositeExplicitAutograd")
    torch.library.register_fake("fault::halve_", lambda x: None, lib=library)
    def f(x, w):
        before = x + 1
        torch.ops.fault.halve_(x)
        return (before * w,)
    if sys.argv[1] == "corrected":
        from irframework.compiler.inductor_fault import correct
        correct()
        correct()
    with torch._inductor.config.patch(fx_graph_cache=False):
        got = torch.compile(f)(torch.ones(4, 8), torch.ones(8, requires_grad=True))
    print(bool((got[0] == 2).all()))
"""


def outcome(program: str, which: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), which],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("program", [TOO_LATE, TOO_EARLY], ids=["too late", "too early"])
def test_corrected_inductor_runs_kernels_when_the_program_does(program):
    assert outcome(program, "corrected") == "True"


@pytest.mark.slow
@pytest.mark.parametrize("program", [TOO_LATE, TOO_EARLY], ids=["too late", "too early"])
def test_the_correction_is_still_needed(program):
    assert outcome(program, "as it is") == "False", "torch has been mended: compiler/inductor_fault.py can go"


def test_a_users_kernel_that_overwrites_runs_behind_the_readers_before_it(add):
    """In inference torch moves readers behind the kernel, but not a call with several results."""

    def halve(x):
        x.mul_(0.5)

    def f(x, w):
        before, _ = add.op(x, x, w)
        torch.ops.irtest_fault.halve_(x)
        return before * 2

    with torch.library._scoped_library("irtest_fault", "DEF") as library:
        library.define("halve_(Tensor(a!) x) -> ()")
        library.impl("halve_", halve, "CompositeExplicitAutograd")
        torch.library.register_fake("irtest_fault::halve_", lambda x: None, lib=library)
        with torch.no_grad(), ir.priority({add.op.name: ["native"]}):
            want = f(torch.ones(4, 8), torch.ones(8))
            got = torch.compile(f, backend="irframework")(torch.ones(4, 8), torch.ones(8))
    assert torch.equal(got, want)
