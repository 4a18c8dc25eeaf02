"""Installed plugins: found, loaded, quarantined."""

import pytest

from .distributions import HEADER, RMS_NORM, answer, run_fresh_python, run_python, write_distribution

SHOW = """
    import json, logging, torch, irframework as ir
    from irframework.plugins import manager
    from irframework.registry import registry
    x = torch.ones(1, 4)
    print(json.dumps({
        "plugins": {p.name: [p.status, p.version, p.reason or "", list(p.providers), list(p.ops)]
                    for p in reversed(ir.plugins())},
        "impls": sorted(ir.ops.rms_norm.impls),
        "ops": sorted(registry.ops),
        "torch_ops": [n for n in dir(torch.ops.irframework) if n.startswith("half")],
        "hooks": sorted(manager().get_canonical_name(p) for p in manager().get_plugins()),
        "names": sorted(name for name, _ in manager().list_name_plugin()),
        "platforms": sorted(p.name for p in ir.platform.platforms()),
        "first": ir.ops.rms_norm.get_priority()[0],
        "sources": {i.provider: [i.plugin, i.source] for i in ir.ops.rms_norm.impls.values()},
        "value": float(ir.ops.rms_norm(x, None, 1e-6)[0, 0]),
    }))
"""

GOOD = """
@ir.hookimpl
def irframework_register_impls():
    @ir.ops.rms_norm.register_impl("pa")
    def rms_norm(x, weight, epsilon, variance_size=None):
        return x * 0 + 5

@ir.hookimpl
def irframework_default_priorities(platform, mode):
    return {"rms_norm": ["pa"]} if platform.name == "cpu" else None
"""

OWN_OP = """
from torch import Tensor

@ir.hookimpl
def irframework_register_ops():
    @ir.register_op
    def whole_op(x: Tensor) -> Tensor:
        return x + 1

@ir.hookimpl
def irframework_register_impls():
    @ir.ops.whole_op.register_impl("pb")
    def whole_op(x):
        return x + 1
"""

HALF = """
from torch import Tensor

@ir.hookimpl
def irframework_platforms():
    class P(ir.Platform):
        name = "halfdev"
        device_types = ("cpu",)
        def is_available(self):
            return True
    return [P()]

@ir.hookimpl
def irframework_register_ops():
    @ir.register_op
    def half_op(x: Tensor) -> Tensor:
        return x + 1

@ir.hookimpl
def irframework_register_impls():
    @ir.ops.rms_norm.register_impl("half")
    def rms_norm(x, weight, epsilon, variance_size=None):
        return x
    @ir.ops.half_op.register_impl("half")
    def half_op(x):
        return x
    raise KeyError("half way")
"""

# name -> (body, what the reason says)
BAD = {
    "bad-import": ("import not_installed_package", "missing requirement: not_installed_package"),
    "bad-syntax": ("def f(:", "SyntaxError"),
    "bad-raise": ("raise RuntimeError('no driver')", "no driver"),
    "bad-exit": ("raise SystemExit(3)", "exit(3)"),
    "bad-half": (HALF, "half way"),
    "bad-signature": (
        "@ir.hookimpl\ndef irframework_register_impls():\n    ir.ops.rms_norm.register_impl('bs')(lambda x: x)",
        "does not have the op's signature",
    ),
    "bad-op": (
        "@ir.hookimpl\ndef irframework_register_impls():\n    ir.ops.rms_nrom.register_impl('bo')(lambda x: x)",
        "rms_norm",
    ),
    "bad-hook": (
        "@ir.hookimpl\ndef irframework_compiler(platform):\n    return None\n"
        "@ir.hookimpl\ndef irframework_passes(stage, nonsense):\n    return []",
        "nonsense",
    ),
    "bad-unknown-hook": ("@ir.hookimpl\ndef irframework_register_kernels():\n    pass", "irframework_register_kernels"),
    "bad-defaults": (
        "@ir.hookimpl\ndef irframework_default_priorities(platform, mode):\n    return {'rms_norm': 3}",
        "rms_norm",
    ),
    "bad-platform": ("@ir.hookimpl\ndef irframework_platforms():\n    return [object()]", "ir.Platform"),
    "bad-platform-name": (
        "@ir.hookimpl\ndef irframework_platforms():\n    class P(ir.Platform):\n        name = 'cuda'\n"
        "        device_types = ('cuda',)\n    return [P()]",
        "cuda",
    ),
    "bad-torch-op": (
        "import torch\nlib = torch.library.Library('irframework', 'FRAGMENT')\n"
        "lib.define('rms_norm(Tensor x) -> Tensor')",
        "rms_norm",
    ),
    "bad-exit-in-hook": ("@ir.hookimpl\ndef irframework_register_ops():\n    raise SystemExit('bye')", "SystemExit"),
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """One environment with good and bad plugins of every kind."""
    root = tmp_path_factory.mktemp("site")
    write_distribution(root, "a-good", GOOD, version="1.2")
    write_distribution(root, "z-op", OWN_OP)
    for name, (body, _) in BAD.items():
        write_distribution(root, name, body)
    write_distribution(root, "bad-api", "", header="IRFRAMEWORK_API = 99\nimport irframework as ir\n")
    write_distribution(root, "bad-no-api", "", header="import irframework as ir\n")
    write_distribution(root, "bad-entry", "", entry="bad-entry = no_such_module")
    write_distribution(root, "bad-attribute", "", entry="bad-attribute = bad_attribute:missing")
    write_distribution(root, "same-name", RMS_NORM.format(provider="sn", value=1), entry="a-good = same_name")
    write_distribution(root, "y-twin", RMS_NORM.format(provider="pa", value=2))
    return root


@pytest.fixture(scope="module")
def shown(distributions):
    done = run_python(SHOW, distributions)
    return answer(done) | {"stderr": done.stderr}


def test_good_plugins_load_beside_bad_ones(shown):
    assert shown["plugins"]["a-good"] == ["loaded", "1.2", "", ["pa"], []]
    assert shown["plugins"]["z-op"] == ["loaded", "1.0", "", ["pb"], ["whole_op"]]
    assert shown["value"] == 5
    assert shown["first"] == "pa"
    assert shown["sources"]["pa"][0] == "a-good"
    assert "a_good.py:" in shown["sources"]["pa"][1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [(name, reason) for name, (_, reason) in BAD.items()]
    + [
        ("bad-api", "version 99"),
        ("bad-no-api", "IRFRAMEWORK_API = 1"),
        ("bad-entry", "no_such_module"),
        ("bad-attribute", "missing"),
    ],
)
def test_bad_plugin_is_quarantined_with_its_reason_and_one_warning(shown, name, reason):
    status, _, why, providers, ops = shown["plugins"][name]
    assert status == "quarantined"
    assert reason in why
    assert providers == ops == []
    warnings = [line for line in shown["stderr"].splitlines() if line.startswith(f"plugin '{name}' ({name} 1.0")]
    assert len(warnings) == 1
    assert "quarantined" in warnings[0]
    assert name not in shown["names"], "its hooks would still be called"


def test_traceback_of_a_bad_plugin_is_shown(shown):
    assert "Traceback" in shown["stderr"]
    assert "bad_raise.py" in shown["stderr"]


def test_nothing_of_a_half_loaded_plugin_stays(shown):
    assert shown["impls"] == ["native", "pa"]
    assert "half_op" not in shown["ops"]
    assert shown["torch_ops"] == []
    assert "halfdev" not in shown["platforms"]


def test_second_distribution_with_a_provider_is_quarantined_and_both_are_named(shown):
    status, _, reason, _, _ = shown["plugins"]["y-twin"]
    assert status == "quarantined"
    assert "a-good" in reason
    assert "a_good.py" in reason
    assert "y_twin.py" in reason


def test_second_distribution_with_an_entry_point_name_is_reported_and_the_first_loads(shown):
    assert "duplicate" in shown["stderr"]
    assert "same-name 1.0" in shown["stderr"]
    assert "sn" not in shown["impls"]


def test_lists_warn_about_plugins_that_are_not_installed_and_disable_the_rest(distributions):
    done = run_python(SHOW, distributions, IRFRAMEWORK_PLUGINS="a-goood,z-op", IRFRAMEWORK_DISABLE_PLUGINS="bad-half")
    got = answer(done)
    assert "a-goood" in done.stderr
    assert "Did you mean 'a-good'" in done.stderr
    assert got["plugins"]["z-op"][0] == "loaded"
    assert got["plugins"]["a-good"][:3:2] == ["disabled", "not in IRFRAMEWORK_PLUGINS"]
    assert {status for name, (status, *_) in got["plugins"].items() if "-" in name and name != "z-op"} == {"disabled"}
    assert "quarantined" not in done.stderr


def test_strict_mode_raises_the_same_error_every_time_and_leaves_nothing(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    write_distribution(tmp_path, "b-bad", "raise RuntimeError('no driver')")
    code = """
        import json, irframework as ir
        from irframework.registry import registry
        said = []
        for _ in range(3):
            try:
                ir.plugins()
            except ir.errors.PluginError as error:
                said.append(str(error))
        print(json.dumps([said, sorted(ir.ops.rms_norm.registered)]))
    """
    said, providers = answer(run_python(code, tmp_path, IRFRAMEWORK_STRICT="1"))
    assert len(said) == 3
    assert len(set(said)) == 1
    assert "b-bad" in said[0]
    assert "no driver" in said[0]
    assert providers == ["native"]


def test_interrupted_loading_can_be_repeated(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    body = (
        "import os\nif not os.environ.pop('AGAIN', None):\n    os.environ['AGAIN'] = '1'\n    raise KeyboardInterrupt\n"
    )
    write_distribution(tmp_path, "b-interrupted", body)
    code = """
        import json, irframework as ir
        try:
            ir.plugins()
        except KeyboardInterrupt:
            found = {p.name: p.status for p in ir.plugins() if "-" in p.name}
            print(json.dumps([found, sorted(ir.ops.rms_norm.impls)]))
    """
    assert answer(run_python(code, tmp_path)) == [{"a-good": "loaded", "b-interrupted": "loaded"}, ["native", "pa"]]


def test_broken_metadata_of_one_distribution_breaks_nothing(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    for number, text in enumerate(
        ["[irframework.plugins]\nno equal sign\n", "garbage", "[irframework.plugins]\n= x\n"]
    ):
        write_distribution(tmp_path, f"broken{number}", "")
        (tmp_path / f"broken{number}-1.0.dist-info" / "entry_points.txt").write_text(text)
    write_distribution(tmp_path, "no-metadata", RMS_NORM.format(provider="nm", value=1))
    (tmp_path / "no_metadata-1.0.dist-info" / "METADATA").unlink()
    done = run_python(SHOW, tmp_path)
    got = answer(done)
    assert got["plugins"]["a-good"][0] == "loaded"


def test_plugin_may_import_the_host_first_or_second_and_use_it_while_loading(tmp_path):
    body = (
        "from irframework import ops\nfrom irframework.ops import rms_norm as early\nimport torch\n"
        "early(torch.ones(1, 4), None, 1e-6)\nir.plugins()\n" + GOOD
    )
    write_distribution(tmp_path, "a-good", body)
    code = """
        import json, torch
        IMPORTS
        found = [p.status for p in ir.plugins() if p.name == "a-good"]
        print(json.dumps([float(f(torch.ones(1, 4), None, 1e-6)[0, 0]), found]))
    """
    plugin_first = "import a_good; import irframework as ir; f = ir.ops.rms_norm"
    host_first = "import irframework as ir; from irframework.ops import rms_norm as f"
    for imports in (plugin_first, host_first):
        assert answer(run_python(code.replace("IMPORTS", imports), tmp_path)) == [5.0, ["loaded"]]


def test_import_and_help_load_no_plugin_and_scan_no_metadata(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    code = """
        import json, sys
        import torch
        before = set(sys.modules)
        import irframework, irframework.ops
        new = set(sys.modules) - before
        print(json.dumps([sorted(n for n in new if n.split(".")[0] in
              ("a_good", "importlib_metadata", "triton", "pydantic", "pluggy", "transformers")),
              torch.cuda.is_initialized(), [n for n in new if n.startswith("torch._inductor")]]))
    """
    assert answer(run_python(code, tmp_path)) == [[], False, []]


def test_plugin_first_loaded_inside_torch_modes_sees_real_tensors(tmp_path):
    body = (
        "import torch\nW = torch.ones(3)\nassert type(W) is torch.Tensor and W.tolist() == [1, 1, 1]\n"
        "assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and W.device.type == 'cpu'\n" + GOOD
    )
    write_distribution(tmp_path, "a-good", body)
    code = """
        import json, torch, irframework as ir
        from torch._subclasses.fake_tensor import FakeTensorMode
        with torch.inference_mode(), FakeTensorMode(), torch.device("meta"):
            y = ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)
        print(json.dumps([[p.status + str(p.reason or "") for p in ir.plugins() if p.name == "a-good"], y.device.type]))
    """
    assert answer(run_python(code, tmp_path)) == [["loaded"], "meta"]


def test_failed_plugin_is_the_cause_given_for_a_provider_it_would_have_brought(tmp_path):
    write_distribution(tmp_path, "acme", "raise ImportError('libacme.so.3: cannot open')")
    write_distribution(tmp_path, "other-kernels", RMS_NORM.format(provider="ok", value=1))
    code = """
        import json, irframework as ir
        said = []
        for make in (lambda: ir.KernelConfig(ir_op_priority={"rms_norm": ["acme"]}),
                     lambda: ir.priority(rms_norm="acme").__enter__(),
                     lambda: ir.KernelConfig(ir_op_priority={"rms_norm": ["unrelated"]}),
                     lambda: ir.KernelConfig(ir_op_priority={"rms_norm": ["other_kernels"]})):
            try:
                make()
            except ir.errors.IrError as error:
                said.append(str(error))
        print(json.dumps(said))
    """
    config, context, unrelated, disabled = answer(
        run_python(code, tmp_path, IRFRAMEWORK_DISABLE_PLUGINS="other-kernels")
    )
    for text in (config, context, unrelated):
        assert "acme" in text
        assert "libacme.so.3: cannot open" in text
    assert "other-kernels" in disabled
    assert "disabled" in disabled


PLATFORMS = """
class P(ir.Platform):
    name = "{name}"
    device_types = ("cpu",)
    def is_available(self):
        return {available}
    def get_default_ir_op_priority(self, mode="eager"):
        return {{"rms_norm": ["{name}"]}}

@ir.hookimpl
def irframework_platforms():
    return [P()]
""" + RMS_NORM.replace("{provider}", "{name}")

PLATFORM = """
    import json, torch, irframework as ir
    print(json.dumps([ir.current_platform().name, ir.ops.rms_norm.get_priority(),
                      float(ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)[0, 0])]))
"""


def test_two_available_platforms_are_decided_by_plugin_name_and_both_are_named(tmp_path):
    write_distribution(tmp_path, "b-one", PLATFORMS.format(name="one", available=True, value=1))
    write_distribution(tmp_path, "a-two", PLATFORMS.format(name="two", available=True, value=2))
    write_distribution(tmp_path, "c-three", PLATFORMS.format(name="three", available="1 / 0", value=3))
    done = run_python(PLATFORM, tmp_path)
    assert answer(done) == ["two", ["two", "one", "three", "native"], 2.0]
    for word in ("one (plugin b-one)", "two (plugin a-two)", "IRFRAMEWORK_PLATFORM"):
        assert word in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert answer(run_python(PLATFORM, tmp_path, IRFRAMEWORK_PLATFORM="one"))[::2] == ["one", 1.0]
    wrong = run_python(PLATFORM, tmp_path, IRFRAMEWORK_PLATFORM="onne")
    assert "PlatformError" in wrong.stderr
    assert "'one'" in wrong.stderr
    missing = run_python(PLATFORM, tmp_path, IRFRAMEWORK_PLATFORM="three")
    assert "not available" in missing.stderr


def test_defaults_of_two_plugins_both_stay_in_order_of_their_names(tmp_path):
    body = RMS_NORM + (
        "@ir.hookimpl\ndef irframework_default_priorities(platform, mode):\n"
        "    return {{'rms_norm': ['{provider}']}} if mode == 'eager' else {{}}\n"
    )
    write_distribution(tmp_path, "m-second", body.format(provider="aaa", value=1))
    write_distribution(tmp_path, "l-first", body.format(provider="zzz", value=2))
    write_distribution(tmp_path, "k-none", RMS_NORM.format(provider="bbb", value=3))
    found = answer(run_python(PLATFORM, tmp_path, IRFRAMEWORK_PLATFORM="cpu"))
    assert found == ["cpu", ["zzz", "aaa", "bbb", "native"], 2.0]


def test_defaults_hook_that_fails_later_quarantines_its_plugin_then(tmp_path):
    body = RMS_NORM.format(provider="late", value=1) + (
        "@ir.hookimpl\ndef irframework_default_priorities(platform, mode):\n"
        "    if platform.name == 'cuda':\n        raise RuntimeError('too late')\n    return {'rms_norm': ['late']}\n"
    )
    write_distribution(tmp_path, "l-late", body)
    code = """
        import json, torch, irframework as ir
        from irframework.priority import entries_for
        before = ir.ops.rms_norm.get_priority()
        with ir.priority(rms_norm="late?"):
            found = [e.provider for e in entries_for(ir.ops.rms_norm, "cuda")]
        print(json.dumps([before, found, ir.ops.rms_norm.get_priority(),
                          float(ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)[0, 0]) < 1.5,
                          [p.status for p in ir.plugins() if p.name == "l-late"]]))
    """
    done = run_python(code, tmp_path, IRFRAMEWORK_PLATFORM="cpu")
    assert answer(done) == [["late", "native"], ["native"], ["native"], True, ["quarantined"]]
    assert "too late" in done.stderr


PROCESSES = """
import json, multiprocessing, os, sys, threading
import torch, irframework as ir

def choose(_=None):
    y = ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)
    return ir.ops.rms_norm.dispatch(torch.ones(1, 4), None, 1e-6).provider, float(y[0, 0])

if __name__ == "__main__":
    found = {}
    gate = threading.Barrier(8)
    def first_use():
        gate.wait()
        found.setdefault("threads", []).append(choose())
    threads = [threading.Thread(target=first_use) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    found["parent"] = choose()
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(choose, [0])
    print(json.dumps(found))
"""


def test_threads_and_worker_processes_choose_as_their_parent(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    (tmp_path / "program.py").write_text(PROCESSES)
    got = answer(
        run_fresh_python("import runpy; runpy.run_module('program', run_name='__main__', alter_sys=True)", tmp_path)
    )
    assert got["parent"] == ["pa", 5.0]
    assert got["threads"] == [["pa", 5.0]] * 8
    assert got["spawn"] == got["fork"] == [["pa", 5.0]]


def test_child_forked_while_another_thread_loads_still_loads(tmp_path):
    waiting = (
        "@ir.hookimpl\ndef irframework_register_ops():\n    import os, time\n"
        "    os.write(int(os.environ['PIPE']), b'x')\n    time.sleep(0.7)\n"
    )
    write_distribution(tmp_path, "a-good", GOOD + waiting)
    code = """
        import json, os, signal, threading
        import torch, irframework as ir
        import irframework.plugins
        read, write = os.pipe()
        os.environ["PIPE"] = str(write)
        thread = threading.Thread(target=ir.load_plugins)
        thread.start()
        os.read(read, 1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(7 if "pa" in ir.ops.rms_norm.impls else 1)
        thread.join()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "pa" in ir.ops.rms_norm.impls]))
    """
    assert answer(run_python(code, tmp_path)) == [7, True]


def test_slow_plugin_is_said_to_be_loading(tmp_path):
    write_distribution(tmp_path, "a-slow", "import time\ntime.sleep(0.5)\n")
    code = """
        import irframework as ir
        import irframework.plugins as p
        p = __import__("sys").modules["irframework.plugins"]
        p._SLOW_SECONDS = 0.1
        ir.load_plugins()
    """
    assert "a-slow" in run_python(code, tmp_path).stderr


def test_plugin_that_was_written_for_an_older_op_still_loads(tmp_path):
    body = """
        @ir.hookimpl
        def irframework_register_impls():
            @ir.ops.rms_norm.register_impl("old")
            def rms_norm(x, weight, epsilon):
                return x * 0 + 3
    """
    write_distribution(tmp_path, "a-old", body)
    code = """
        import json, torch, irframework as ir
        x = torch.ones(1, 4)
        old, new = (ir.ops.rms_norm(x, None, 1e-6, *more)[0, 0] for more in ((), (2,)))
        print(json.dumps([float(old), float(new) < 2]))
    """
    assert answer(run_python(code, tmp_path)) == [3.0, True]


def test_header_is_what_the_documentation_says():
    assert HEADER.startswith("IRFRAMEWORK_API = 1")


def test_entry_point_that_is_no_object_reference_breaks_nothing(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    write_distribution(tmp_path, "b-broken", "", entry="b-broken = not a module!")
    got = answer(run_python(SHOW, tmp_path))
    assert got["plugins"]["a-good"][0] == "loaded"
    assert got["plugins"]["b-broken"][0] == "quarantined"


def test_plugin_that_raises_no_exception_but_a_skip_is_quarantined(tmp_path):
    write_distribution(tmp_path, "b-good", GOOD)
    write_distribution(tmp_path, "a-skips", "class Skipped(BaseException): ...\nraise Skipped('not here')")
    assert answer(run_python(SHOW, tmp_path))["plugins"]["a-skips"][0] == "quarantined"


def test_failed_plugin_leaves_nothing_on_the_ops_of_others(tmp_path):
    write_distribution(tmp_path, "a-good", GOOD)
    body = """
        import torch
        @ir.hookimpl
        def irframework_register_impls():
            op = ir.ops.rms_norm
            for provider in list(op.registered):
                op.unregister_impl(provider)
            op.register_fake(lambda x, weight, epsilon, variance_size=None: x.double())
            op.register_backward(lambda grads, *args: (None, None))
            op.register_input_generator(lambda **options: ())
            op.override_tolerance(torch.float32, atol=1e9, rtol=0.0)
            ir.configure(ir.KernelConfig(ir_op_priority={"rms_norm": ["native"]}))
            raise RuntimeError("after all that")
    """
    write_distribution(tmp_path, "z-meddles", body)
    code = """
        import json, torch, irframework as ir
        op = ir.ops.rms_norm
        ir.load_plugins()
        print(json.dumps([sorted(op.impls), op.fake is None, op.backward is None, op.input_generator.__name__,
                          op.get_tolerance(torch.float32).atol, ir.current_config().ir_op_priority]))
    """
    found = answer(run_python(code, tmp_path))
    assert found == [["native", "pa"], True, True, "_rms_norm_inputs", 1e-5, {}]


@pytest.mark.parametrize("hook", ["irframework_passes(stage)", "irframework_compiler(platform)"])
def test_hook_that_fails_while_compiling_names_its_plugin(tmp_path, hook):
    write_distribution(tmp_path, "a-late", f"@ir.hookimpl\ndef {hook}:\n    raise RuntimeError('boom')\n")
    code = """
        import json, irframework as ir
        from irframework.plugins import compiler_passes, load_plugins, platform_compiler
        load_plugins()
        said = []
        for ask in (lambda: compiler_passes("after_fusion"), lambda: platform_compiler(ir.current_platform())):
            try:
                ask()
            except ir.errors.PluginError as error:
                said.append(str(error))
        print(json.dumps(said))
    """
    (said,) = answer(run_python(code, tmp_path))
    assert "plugin 'a-late' (a-late 1.0" in said
    assert "RuntimeError: boom" in said
