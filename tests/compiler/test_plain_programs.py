"""Programs in plain torch, which hold no IR op that could carry a guard: what `ir.install()` does for them."""

import threading

import pytest
import torch
from compiler_support import lowered, run
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

import irframework as ir
from irframework.compiler.pipeline import PostPass, PrePass
from irframework.compiler.report import Report

OURS = ("pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Inductor as it is before irframework is there, with a cache of its own, and without a C++ compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch({**dict.fromkeys(OURS), "fx_graph_cache": True, "fallback_by_default": True}):
        yield


def _body(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).erf() * 3


@pytest.fixture(scope="module")
def fused():
    """A fused op whose body is plain torch. Its providers return other values, so that their use can be seen."""
    op = ir.register_op(name="plain_program_body", fuse=True)(_body)
    op.register_impl("k")(lambda x, y: x - y)
    op.register_impl("j")(lambda x, y: x * y)
    return op


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
Y = torch.tensor([[0.5, 0.0], [0.0, 0.25]])
PROGRAM = {"native": _body(X, Y), "k": X - Y, "j": X * Y}


def program(x, y):
    return (x + y).erf() * 3


def which(compiled, *choice):
    """Whose implementation a call ran."""
    with torch.no_grad(), ir.priority({"plain_program_body": list(choice)} if choice else {}):
        got = compiled(X, Y)
    (found,) = (name for name, wanted in PROGRAM.items() if torch.allclose(got, wanted))
    return found


def compiles():
    return counters["stats"]["unique_graphs"]


def test_without_install_and_before_any_ir_op_nothing_happens(clean, fused):
    compiled = torch.compile(program)
    before, report = compiles(), ir.last_report()
    assert [which(compiled, each) for each in ("k", "native")] == ["native", "native"]
    assert compiles() - before == 1
    assert [getattr(config, name) for name in OURS] == [None] * 3
    assert ir.last_report() is report


def test_after_install_it_is_raised_and_follows_priorities_with_one_compile_per_choice(clean, fused):
    ir.install()
    compiled = torch.compile(program)
    wanted = ["k", "native", "j", "k", "native", "j"]
    before = compiles()
    assert [which(compiled, each) for each in wanted] == wanted
    assert compiles() - before == 3


def test_the_first_ir_op_that_is_traced_does_the_same_for_what_is_compiled_later(clean, fused, scale):
    run(lambda x: scale(x), torch.ones(2), backend="aot_eager")
    compiled = torch.compile(program)
    assert [which(compiled, each) for each in ("k", "native")] == ["k", "native"]


@pytest.mark.parametrize("backend", ["irframework", lowered], ids=["irframework", "lowered"])
def test_other_ways_to_compile_need_no_install(clean, fused, backend):
    compiled = torch.compile(program, backend=backend)
    assert [which(compiled, each) for each in ("k", "native", "k")] == ["k", "native", "k"]


def test_threads_choose_apart(clean, fused):
    ir.install()
    compiled = torch.compile(program)
    found = []

    def other():
        with config.patch(fallback_by_default=True):  # Inductor's configuration is of one thread
            ir.install()
            found.append(which(compiled, "native"))

    assert which(compiled, "k") == "k"
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (which(compiled, "k"), found) == ("k", ["native"])


def test_switching_fusion_off_and_on_compiles_once_each(clean, fused, configured):
    ir.install()
    compiled = torch.compile(program)
    before, found = compiles(), []
    for fusion in (True, False, True, False):
        configured(fusion=fusion)
        found.append(which(compiled, "k"))
    assert found == ["k", "native", "k", "native"]
    assert compiles() - before == 2


def test_leaving_one_fused_op_out_compiles_again(clean, fused, configured):
    ir.install()
    compiled, found = torch.compile(program), []
    for names in ([], [fused.name], []):
        configured(disable_fusions=names)
        found.append(which(compiled, "k"))
    assert found == ["k", "native", "k"]


def test_a_provider_that_is_registered_later_compiles_again(clean):
    op = ir.register_op(name="plain_program_sine", fuse=True)(_sine)
    ir.install()
    compiled = torch.compile(lambda x, y: (x + y).sin() * 5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, Y), _sine(X, Y))
        op.register_impl("k")(lambda x, y: x - y)
        torch.testing.assert_close(compiled(X, Y), X - Y)


def _sine(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).sin() * 5


# --- what comes from the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_what_comes_from_the_cache_is_guarded_and_reported(clean, fused, backend):
    ir.install()
    assert which(torch.compile(program, backend=backend), "k") == "k"
    assert ir.last_report().fusions == {fused.name: 1}
    torch._dynamo.reset()
    again = torch.compile(program, backend=backend)
    assert which(again, "k") == "k"
    report = ir.last_report()
    assert (report.from_cache, report.fusions) == (True, {fused.name: 1})
    assert [which(again, each) for each in ("native", "k")] == ["native", "k"]


def test_the_cache_keeps_choices_and_fusion_apart(clean, fused, configured):
    ir.install()
    for fusion, choice, wanted in (
        (True, "k", "k"),
        (False, "k", "native"),
        (True, "native", "native"),
        (True, "j", "j"),
    ):
        configured(fusion=fusion)
        torch._dynamo.reset()
        assert which(torch.compile(program), choice) == wanted
    configured(fusion=True)
    torch._dynamo.reset()
    assert which(torch.compile(program), "k") == "k"
    assert ir.last_report().from_cache


def keys():
    return PrePass().uuid(), PostPass().uuid()


def test_a_fused_op_that_is_declared_changes_the_keys(declare):
    before = keys()
    op = declare(_tangent, fuse=True)
    assert len({before, keys()}) == 2
    assert op.fuse


def _tangent(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).tanh() * 7


@pytest.mark.parametrize("fuse", [True, ir.supports(ndim=2), ir.supports(ndim={"x": 2})])
def test_the_domain_of_a_fused_op_is_in_the_keys(monkeypatch, declare, fuse):
    op = declare(_cosine)
    before = keys()
    monkeypatch.setattr(op, "fuse", fuse)
    ir.configure(ir.KernelConfig())  # what is known of ops is read again
    assert keys() != before


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).cos() * 9


def test_a_plain_program_that_comes_from_the_cache_unchanged_says_nothing(clean):
    ir.install()
    f = torch.mm
    for _ in range(2):
        torch._dynamo.reset()
        before = ir.last_report()
        run(lambda x, y: f(x, y), X, Y, backend="inductor")
        assert ir.last_report() is before


def test_the_backend_always_has_a_report(clean):
    for from_cache in (False, True):
        torch._dynamo.reset()
        before = ir.last_report()
        run(lambda x, y: torch.mm(x, y), X, Y, backend="irframework")
        report = ir.last_report()
        assert isinstance(report, Report)
        assert report is not before
        assert (report.from_cache, report.fusions) == (from_cache, {})


def test_late_pre_grad_passes_do_not_lose_the_guard(clean, fused):
    if not hasattr(config, "pre_grad_pass_timing"):
        pytest.skip("this torch always runs pre-grad passes before it looks into the cache")
    with config.patch(pre_grad_pass_timing="late"):
        ir.install()
        assert which(torch.compile(program), "k") == "k"
        torch._dynamo.reset()
        again = torch.compile(program)
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert [which(again, each) for each in ("k", "native", "k")] == ["k", "native", "k"]
        now = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert now > hits
