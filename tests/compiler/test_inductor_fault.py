"""The fault of Inductor that `compiler/inductor_fault.py` corrects, shown in plain torch."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
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


def outcome(which: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), which],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_corrected_inductor_runs_kernels_before_their_readers():
    assert outcome("corrected") == "True"


@pytest.mark.slow
def test_the_correction_is_still_needed():
    assert outcome("as it is") == "False", "torch has been mended: compiler/inductor_fault.py can go"
