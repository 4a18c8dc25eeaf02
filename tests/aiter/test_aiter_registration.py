"""What the plugin registers where there is no AITER."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import irframework as ir

QUANTISING = tuple(
    name
    for name in ir.ops.__all__
    if name.endswith("static_quant_fp8") and not name.startswith(("gelu", "all_reduce", "scaled_linear"))
)
OPS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", *QUANTISING)
README = Path(__file__).parents[2] / "plugins" / "aiter_rocm" / "README.md"


@pytest.fixture
def fresh():
    from irframework_aiter_rocm import implementations, library

    library.check_aiter.cache_clear()
    yield implementations
    library.check_aiter.cache_clear()


def test_the_plugin_loads():
    (info,) = (plugin for plugin in ir.plugins() if plugin.name == "aiter_rocm")
    assert (info.status, info.providers) == ("loaded", ("aiter",))


@pytest.mark.parametrize("name", OPS)
def test_its_implementations_are_for_rocm_devices(name):
    ir.load_plugins()
    assert getattr(ir.ops, name).impls["aiter"].device_types == ("cuda",)


def test_a_torch_without_rocm_is_the_reason_why_nothing_runs(fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert "is not built for ROCm" in fresh.aiter_runs().reason


def test_a_missing_aiter_is_the_reason_why_nothing_runs(fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "aiter is not installed" in fresh.aiter_runs().reason


def test_aiter_is_not_imported_to_find_out():
    text = "import sys, irframework as ir; ir.ops.rms_norm.supported_providers(); sys.exit('aiter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_aiter_is_preferred_on_rocm_only():
    import irframework_aiter_rocm as plugin

    from irframework.platform import BUILT_IN

    chosen = {p.name: plugin.irframework_default_priorities(p, "eager") for p in BUILT_IN}
    assert chosen == {"rocm": {"*": ("aiter",)}, "cuda": None, "xpu": None, "cpu": None}


def test_compiled_code_quantises_natively_in_one_pass():
    import irframework_aiter_rocm as plugin

    from irframework.platform import BUILT_IN

    (rocm,) = (p for p in BUILT_IN if p.name == "rocm")
    chosen = plugin.irframework_default_priorities(rocm, "inductor")
    assert chosen == {"*": ("aiter",), **dict.fromkeys(QUANTISING, ("native", "aiter"))}


def test_the_readme_lists_each_op_that_is_wrapped_and_no_other():
    ir.load_plugins()
    wrapped = README.read_text().partition("## What it does not wrap, and why")[0]
    listed = [name for name in ir.ops.__all__ if f"| `{name}` |" in wrapped]
    assert listed == [name for name in ir.ops.__all__ if "aiter" in getattr(ir.ops, name).impls]


def test_the_readme_says_why_the_others_are_not_wrapped_by_name_or_by_family():
    ir.load_plugins()
    refused = README.read_text().partition("Therefore AITER is no provider of")[2].partition("\n## ")[0]
    for name in ir.ops.__all__:
        op = getattr(ir.ops, name)
        family = op.native.__module__.removeprefix("irframework.ops.")
        if "aiter" in op.impls:
            assert f"`{name}`" not in refused, name
        else:
            assert f"`{name}`" in refused or f"`{family}.py`" in refused, name
