"""What is in the keys of compiled code: every change gives a new entry, and no change gives a hit."""

import re
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import irframework as ir
from irframework.compiler import foreign_passes, pipeline
from irframework.compiler.pipeline import AFTER, BEFORE, PostPass, PrePass
from irframework.registry import registry
from irframework.settings import VARIABLES, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from distributions import answer, run_python, write_distribution

# --- the key, in this process -----------------------------------------------------------------------------------------

MATTERS = {  # for each field a value other than the default's; None where no compiled code depends on it
    "ir_op_priority": {"rms_norm": ["native"]},
    "fusion": False,
    "disable_fusions": ["fused_add_rms_norm"],
    "sequence_parallel": 64,
    "batch_invariant": True,
    "custom_ops": ["all", "-rms_norm"],
    "strict": None,  # how a plugin's failure is told
    "autotune": None,  # this version has no tuning yet
}


def key():
    return PrePass().uuid(), PostPass().uuid()


@pytest.fixture
def other_provider():
    """A provider of rms_norm, so that its order can differ, that is not batch invariant."""

    @ir.ops.rms_norm.register_impl("tc_other")
    def other(x, weight, epsilon, variance_size=None):
        return x

    yield
    ir.ops.rms_norm.unregister_impl("tc_other")


@pytest.mark.parametrize("field", list(ir.KernelConfig.model_fields))
def test_each_field_of_the_configuration_is_in_the_key_or_said_not_to_matter(configured, other_provider, field):
    before = key()
    value = MATTERS[field]
    configured(**{field: value if value is not None else True})
    assert (key() == before) == (value is None)


VARIABLE_MATTERS = {
    "OP_PRIORITY": "rms_norm=native",
    "BATCH_INVARIANT": "1",
    "FUSION": "0",
    "DISABLE_FUSIONS": "fused_add_rms_norm",
    "SEQUENCE_PARALLEL": "64",
    "DISABLE_PASSES": "remove_copies",
    "BISECT_LIMIT": "3",
    "PLUGINS": None,  # what is loaded is decided once per process; in the key by what is registered
    "DISABLE_PLUGINS": None,
    "PLATFORM": None,  # in the key by the priorities it gives
    "STRICT": None,
    "LOGGING_LEVEL": None,
    "CHECK_DONATION": None,  # eager calls only
    "CHECK_VALUES": None,  # eager calls only
    "CUSTOM_OPS": "all,-rms_norm",
    "BISECT_LOG": "log",
}


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
def test_each_variable_is_in_the_key_or_said_not_to_matter(monkeypatch, other_provider, name):
    value = VARIABLE_MATTERS[name]
    before = key()
    if value is None:
        return
    try:
        monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()
        registry.changed()
        assert key() != before
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        registry.changed()
    assert key() == before


@pytest.mark.parametrize("change", ["backward", "shape function", "implementation", "predicate", "later op"])
def test_what_is_registered_is_in_the_key(scale, change):
    before = key()
    if change == "backward":
        scale.register_backward(lambda grads, x, factor: (grads[0],))
    elif change == "shape function":
        scale.register_fake(lambda x, factor=2.0: x)
    elif change == "implementation":
        scale.register_impl("seven")(lambda x, factor=2.0: x * 7)
    elif change == "predicate":
        scale.register_impl("seven", supports_args=ir.supports(ndim=2))(lambda x, factor=2.0: x * 7)
        before = key()
        scale.unregister_impl("seven")
        scale.register_impl("seven", supports_args=ir.supports(ndim=3))(lambda x, factor=2.0: x * 7)
    else:
        ir.register_op(name=f"{scale.name}_later", fuse=True)(scale.native)
    assert all(one != other for one, other in zip(key(), before, strict=True))


@pytest.mark.parametrize("module", ["irframework", "torch"])
def test_the_versions_of_torch_and_irframework_are_in_the_key(monkeypatch, module):
    before = key()
    pipeline._source_digest.cache_clear()
    pipeline.versions.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], "__version__", "77.0")
        assert key() != before
    pipeline._source_digest.cache_clear()
    pipeline.versions.cache_clear()
    assert key() == before


def test_the_source_of_irframework_is_in_the_key(monkeypatch):
    before = key()
    pipeline._source_digest.cache_clear()
    read = Path.read_bytes
    from irframework import code_files

    code_files.content_digest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == "lowering.py" else b""))
        assert key() != before
    pipeline._source_digest.cache_clear()
    code_files.content_digest.cache_clear()


@pytest.mark.parametrize("stage", [BEFORE, AFTER])
def test_what_a_plugins_pass_bakes_in_is_in_the_key_if_its_uuid_says_so(monkeypatch, stage):
    class Sharding:
        def __init__(self, rank):
            self.rank = rank

        def __call__(self, graph):
            pass

        def uuid(self):
            return ("sharding", self.rank)

    found = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(
            foreign_passes, "compiler_passes", lambda at, rank=rank: [("plug", Sharding(rank))] if at == stage else []
        )
        found.append((PrePass() if stage == BEFORE else PostPass()).uuid())
    assert found[0] == found[2] != found[1]


def test_a_library_of_operators_that_is_loaded_from_elsewhere_is_in_the_key(monkeypatch, tmp_path):
    library = tmp_path / "kernels.so"
    library.write_text("one")
    before = key()
    monkeypatch.setattr(torch.ops, "loaded_libraries", {*torch.ops.loaded_libraries, str(library)})
    loaded = key()
    library.write_text("another")
    assert len({before, loaded, key()}) == 3


# --- the key, in processes with plugins -------------------------------------------------------------------------------

KEY = """
    import json, irframework as ir
    from irframework.compiler.pipeline import PostPass, PrePass
    print(json.dumps([PrePass().uuid(), PostPass().uuid()]))
"""
PLUGIN = """
import os

@ir.hookimpl
def irframework_register_impls():
    @ir.ops.rms_norm.register_impl("plug", supported=lambda: os.environ.get("PLUG_OFF") != "1")
    def rms_norm(x, weight, epsilon, variance_size=None):
        return {body}

@ir.hookimpl
def irframework_cache_key_factors():
    return {{"PLUG_MODE": os.environ.get("PLUG_MODE", "fast")}}
"""


@pytest.fixture
def plug(tmp_path):
    """Write the plugin anew, in a folder of its own."""

    def write(number, body="x * 7", version="1.0"):
        root = tmp_path / f"site{number}"
        root.mkdir()
        write_distribution(root, "plug", PLUGIN.format(body=body), version=version)
        return root

    return write


def test_each_change_of_a_plugin_and_its_surroundings_gives_a_key_of_its_own(plug):
    first = plug(1)
    keys = {
        "as it is": answer(run_python(KEY, first)),
        "uninstalled": answer(run_python(KEY)),
        "another version": answer(run_python(KEY, plug(2, version="1.1"))),
        "another source": answer(run_python(KEY, plug(3, body="x * 8"))),
        "not supported": answer(run_python(KEY, first, PLUG_OFF="1")),
        "another factor": answer(run_python(KEY, first, PLUG_MODE="exact")),
        "another priority": answer(run_python(KEY, first, IRFRAMEWORK_OP_PRIORITY="rms_norm=native")),
    }
    assert len({str(found) for found in keys.values()}) == len(keys)
    assert answer(run_python(KEY, first)) == keys["as it is"]
    assert answer(run_python(KEY, plug(4))) == keys["as it is"]


def test_a_plugin_whose_factors_fail_is_named(plug, tmp_path):
    write_distribution(
        tmp_path, "bad", "@ir.hookimpl\ndef irframework_cache_key_factors():\n    raise ZeroDivisionError('oops')"
    )
    done = run_python(KEY, tmp_path)
    assert "irframework_cache_key_factors of plugin 'bad'" in done.stderr
    assert "ZeroDivisionError: oops" in done.stderr


# --- Inductor's caches, in several processes --------------------------------------------------------------------------

PROGRAM = """
    import json, os, sys, torch
    import irframework as ir
    from torch._dynamo.utils import counters

    torch._inductor.config.fx_graph_cache = True
    torch._inductor.config.force_disable_caches = False
    torch._inductor.config.cpp_cache_precompile_headers = False  # they take longer than the one kernel that uses them
    x = torch.arange(4.0).reshape(2, 2)

    @ir.register_op(name="cached", allow_inplace=True)
    def cached(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    exec(open(os.environ["IMPLEMENTATIONS"]).read()) if "IMPLEMENTATIONS" in os.environ else None

    def count():
        aot, inductor = counters["aot_autograd"], counters["inductor"]
        return {
            "hits": min(aot["autograd_cache_hit"], inductor["fxgraph_cache_hit"]),
            "misses": aot["autograd_cache_miss"] + inductor["fxgraph_cache_miss"],
        }

    def show(function, *arguments, backend, **options):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            result = torch.compile(function, backend=backend, **options)(*arguments)
        report = ir.last_report()
        return {"result": result.tolist(), **count(), "from_cache": report.from_cache, "said": report.summary()}
"""
BACKENDS = ("irframework", "inductor")
SQUARE, TRANSPOSED, TWICE = [[2.0, 3.0], [6.0, 11.0]], [[1.0, 3.0], [3.0, 13.0]], [[6.0, 11.0], [22.0, 39.0]]


@pytest.fixture
def process(tmp_path):
    """Run a program that compiles, over a cache directory of this test's own; True and False of JSON come back."""

    def run(code, implementations=None, path=None, **environment):
        if implementations is not None:
            file = tmp_path / "implementations.py"
            file.write_text(textwrap.dedent(implementations))
            environment["IMPLEMENTATIONS"] = str(file)
        program = textwrap.dedent(PROGRAM) + textwrap.dedent(code)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
        return answer(run_python(program, path, ("torch", "torch._inductor.compile_fx"), **environment))

    return run


COMPILE = """
    print(json.dumps([show(lambda x: cached(x), x, backend=backend) for backend in ("irframework", "inductor")]))
"""
HELPED = """
    def help(x):
        return {helped}

    @cached.register_impl("p", supports_args={condition})
    def p(x):
        return torch.mm(x, help(x))
"""


def test_processes_with_different_choices_share_one_cache_directory_and_no_entry(process):
    plain = HELPED.format(helped="x.t()", condition="None")
    other_helper = HELPED.format(helped="torch.mm(x, x)", condition="None")
    declines = HELPED.format(helped="x.t()", condition="ir.supports(ndim=3)")
    seen = [
        ("first", TRANSPOSED, process(COMPILE, plain, IRFRAMEWORK_OP_PRIORITY="cached=p")),
        ("again", TRANSPOSED, process(COMPILE, plain, IRFRAMEWORK_OP_PRIORITY="cached=p")),
        ("another priority", SQUARE, process(COMPILE, plain, IRFRAMEWORK_OP_PRIORITY="cached=native")),
        ("another helper", TWICE, process(COMPILE, other_helper, IRFRAMEWORK_OP_PRIORITY="cached=p")),
        ("another predicate", SQUARE, process(COMPILE, declines, IRFRAMEWORK_OP_PRIORITY="cached=p")),
        ("gone", SQUARE, process(COMPILE, "")),
        ("as at first", TRANSPOSED, process(COMPILE, plain, IRFRAMEWORK_OP_PRIORITY="cached=p")),
    ]
    for when, result, both in seen:
        assert [each["result"] for each in both] == [result, result], when
    for when, _, both in seen:
        hit = when in ("again", "as at first", "gone")  # without the provider, as with native named in front of it
        assert (both[0]["hits"], both[0]["misses"]) == ((1, 0) if hit else (0, 2)), when
        assert both[0]["from_cache"] is hit, when
        assert both[1]["from_cache"], when  # it compiles the graph that the other backend has left in the cache
    assert seen[1][2][0]["said"] == (
        "compiled from cache; passes not run; when they ran: lowered cached 1xp; fused nothing; copies 0 inserted, 0 "
        "removed"
    )


PLUGGED = """
    weight = torch.ones(2)
    f = lambda x: ir.ops.rms_norm(x, weight, 1e-6)
    print(json.dumps([show(f, x, backend=backend) for backend in ("irframework", "inductor")]))
"""


def test_what_a_plugin_left_in_the_cache_is_gone_with_the_plugin_and_with_its_version(process, plug):
    body, squared = "x @ x", "x @ x @ x"
    first = plug(1, body=body)
    plugged = process(PLUGGED, path=first)
    assert [each["result"] for each in plugged] == [SQUARE, SQUARE]
    assert [each["from_cache"] for each in process(PLUGGED, path=first)] == [True, True]
    newer = process(PLUGGED, path=plug(2, body=squared, version="1.1"))
    assert [each["result"] for each in newer] == [TWICE, TWICE]
    assert not process(PLUGGED, path=first, PLUG_MODE="exact")[0]["from_cache"]


KINDS = """
    import functools, types
    from irframework.digest import digest_function

    def partial_of(matrix, x):
        return torch.mm(x, matrix)

    class Callable:
        __name__ = "callable"

        def __init__(self, matrix):
            self.matrix = matrix

        def __call__(self, x):
            return torch.mm(x, self.matrix)

    other = torch.arange(4.0).reshape(2, 2) + float(os.environ["VALUE"])
    cell = compile("def executed(x): return torch.mm(x, other)", "<ipython-input-%d-abc>" % os.getpid(), "exec")
    exec(cell)
    kinds = {
        "executed": executed,
        "lambda": lambda x: torch.mm(x, other),
        "partial": functools.partial(partial_of, other),
        "callable": Callable(other),
        "method": Callable(other).__call__,
    }
    for name, kind in kinds.items():
        cached.register_impl(name)(kind)
    found = {}
    for name in kinds:
        with ir.priority(cached=[name]):
            found[name] = show(lambda x: cached(x), x, backend=os.environ["BACKEND"])
    print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_of_every_kind_compiles_and_comes_from_the_cache_until_it_changes(process, backend):
    first = process(KINDS, BACKEND=backend, VALUE="0")
    again = process(KINDS, BACKEND=backend, VALUE="0")
    other = process(KINDS, BACKEND=backend, VALUE="1")
    for name in first:
        assert first[name]["result"] == again[name]["result"] == SQUARE, name
        assert other[name]["result"] == [[3.0, 4.0], [11.0, 16.0]], name
        assert (again[name]["hits"], again[name]["misses"]) == (1, 0), name
        assert other[name]["misses"], name


INPLACE = """
    lib = torch.library.Library("tcdonated", "DEF")
    lib.define("square_(Tensor(a!) x) -> ()")

    def square(x):
        x.copy_(torch.mm(x, x))

    lib.impl("square_", square, "CompositeExplicitAutograd")
    torch.library.register_fake("tcdonated::square_", lambda x: None, lib=lib)

    @cached.register_impl("inp", inplace=True)
    def inp(x):
        torch.ops.tcdonated.square_(x)
        return x
"""
DONATING = """
    def f(x, y):
        other = torch.mm(y, y)
        return cached.maybe_inplace(x), other

    def call(backend, alike):
        torch._dynamo.reset()
        counters.clear()
        x = torch.arange(4.0).reshape(2, 2)
        y = x if alike == "same" else x.view(2, 2) if alike == "view" else x.clone()
        with torch.no_grad():
            results = torch.compile(f, backend=backend)(x, y)
        report = ir.last_report()
        return {"results": [r.tolist() for r in results], "x": x.tolist(), **count(), "from_cache": report.from_cache}

    order = os.environ["ORDER"].split(",")
    print(json.dumps([call(os.environ["BACKEND"], alike) for alike in order]))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_alias_in_a_second_process_never_get_the_code_of_those_that_do_not(process, backend):
    untouched = torch.arange(4.0).reshape(2, 2).tolist()
    (apart,) = process(DONATING, INPLACE, BACKEND=backend, ORDER="apart", IRFRAMEWORK_OP_PRIORITY="cached=inp")
    assert apart["results"] == [SQUARE, SQUARE]
    assert apart["x"] == SQUARE  # it was overwritten: there is something to get wrong
    warm = process(
        DONATING, INPLACE, BACKEND=backend, ORDER="view,same,apart,view", IRFRAMEWORK_OP_PRIORITY="cached=inp"
    )
    for each, alike in zip(warm, ("view", "same", "apart", "view"), strict=True):
        assert each["results"] == [SQUARE, SQUARE], alike
        assert each["x"] == (SQUARE if alike == "apart" else untouched), alike
    assert [each["from_cache"] for each in warm] == [False, False, True, True]


@pytest.mark.parametrize("switch", ["fx_graph_cache = False", "force_disable_caches = True"])
def test_where_inductor_caches_nothing_nothing_is_kept(process, tmp_path, switch):
    for _ in range(2):
        both = process(f"    torch._inductor.config.{switch}\n" + COMPILE.lstrip("\n"))
        assert [each["result"] for each in both] == [SQUARE, SQUARE]
        assert [(each["hits"], each["from_cache"]) for each in both] == [(0, False), (0, False)]
    left = {place.name for place in (tmp_path / "cache").iterdir()}
    assert not left & {"irframework", "fxgraph"}


TIMINGS = """
    from torch._inductor import config

    found = []
    for timing in ("late", "early", "late"):
        with config.patch(pre_grad_pass_timing=timing) if hasattr(config, "pre_grad_pass_timing") else config.patch():
            mine = x.clone()
            shown = show(lambda x: cached.maybe_inplace(x), mine, backend="inductor")
            found.append({**shown, "overwritten": not torch.equal(mine, x)})
    print(json.dumps(found))
"""


def test_settings_of_the_pre_grad_pass_that_donate_differently_share_no_entry(process):
    late, early, again = process(TIMINGS, INPLACE, IRFRAMEWORK_OP_PRIORITY="cached=inp")
    assert late["result"] == early["result"] == again["result"] == SQUARE
    if hasattr(torch._inductor.config, "pre_grad_pass_timing"):  # 2.11 has one time only
        assert [each["overwritten"] for each in (late, early, again)] == [False, True, False]
        assert [each["from_cache"] for each in (late, early, again)] == [False, False, True]


def test_a_helper_that_is_defined_again_is_in_the_key(scale):
    """As in a notebook: the implementation that calls it stays, and so do its registration and its guards."""
    scope = {}
    exec("def help(x): return x + 1", scope)
    exec("def p(x, factor=2.0): return help(x)", scope)
    scale.register_impl("p")(scope["p"])
    with ir.priority({scale.name: "p"}):
        before, again = key(), key()
        exec("def help(x): return x + 2", scope)
        after = key()
    assert before == again
    assert before[0] != after[0]
    assert before[1] != after[1]


NESTED = """
    @ir.register_op(name="inner")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    inner.register_impl("transposed")(lambda x: torch.mm(x, x.t()))
    cached.register_impl("nest")(lambda x: inner(x))
    found = []
    torch._dynamo.reset()
    f = torch.compile(lambda x: cached(x), backend=os.environ["BACKEND"])
    with torch.no_grad():
        for provider in ("native", "transposed") * 2:
            counters.clear()
            with ir.priority(cached=["nest"], inner=[provider]):
                result = f(x).tolist()
            found.append([result, counters["aot_autograd"]["total"], count()["hits"]])
    print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_of_an_op_behind_a_cache_hit_compiles_once_per_choice_and_both_stay(process, backend):
    for hits in (0, 1):
        found = process(NESTED, BACKEND=backend)
        assert [result for result, _, _ in found] == [SQUARE, TRANSPOSED] * 2
        assert [compiles for _, compiles, _ in found] == [1, 1, 0, 0]
        assert [hit for _, _, hit in found] == [hits, hits, 0, 0]


# --- what the compiled code is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [["native"], []])
def test_an_op_that_runs_native_fuses_with_its_surroundings_into_one_kernel(order):
    weight = torch.ones(64)
    names = ir.priority(rms_norm=order) if order else ir.priority({})
    only_native = {name: impl for name, impl in ir.ops.rms_norm.registered.items() if name == "native"}
    with pytest.MonkeyPatch.context() as patch, config.patch(fx_graph_cache=False), torch.no_grad(), names:
        patch.setattr(ir.ops.rms_norm, "registered", only_native)
        registry.changed()
        f = torch.compile(lambda x: ir.ops.rms_norm(x, weight, 1e-6) * 2 + 1)
        _, (code,) = run_and_get_code(f, torch.randn(4, 64))
    registry.changed()
    assert "irframework." not in code
    assert len(re.findall(r"^cpp_fused\w* =", code, re.M)) == 1


def test_the_time_to_compile_ops_that_are_left_opaque_grows_with_their_number(scale, monkeypatch):
    op = ir.register_op(name=f"{scale.name}_opaque")(opaque)
    monkeypatch.setattr(pipeline, "steps_of", lambda *given: [])

    def seconds(count):
        def chain(x):
            for _ in range(count):
                x = op(x)
            return x

        torch._dynamo.reset()
        began = time.perf_counter()
        torch.compile(chain)(torch.eye(2))
        return time.perf_counter() - began

    with config.patch(fx_graph_cache=False), torch.no_grad():
        seconds(2)
        assert seconds(120) < 10 * seconds(30)  # in proportion it is 4, in squares 16


def opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)
