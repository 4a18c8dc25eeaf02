"""What the plugin registers where there is no vllm-xpu-kernels."""

import importlib.util

import pytest
import torch

import irframework as ir

OPS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding")


@pytest.fixture
def fresh():
    from irframework_xpu_sycl import implementations, library

    library.load_kernels.cache_clear()
    yield implementations
    library.load_kernels.cache_clear()


def test_the_plugin_loads():
    (info,) = (plugin for plugin in ir.plugins() if plugin.name == "xpu_sycl")
    assert (info.status, info.providers) == ("loaded", ("xpu_kernels",))


@pytest.mark.parametrize("name", OPS)
def test_its_implementations_are_for_intel_gpus(name):
    ir.load_plugins()
    assert getattr(ir.ops, name).impls["xpu_kernels"].device_types == ("xpu",)


def test_a_torch_without_xpu_is_the_reason_why_nothing_runs(fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert "is not built for Intel GPUs" in fresh.kernels_load().reason


def test_a_missing_package_is_the_reason_why_nothing_runs(fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", "20250300", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "vllm-xpu-kernels is not installed" in fresh.kernels_load().reason


def test_the_kernels_are_preferred_on_intel_gpus_only():
    import irframework_xpu_sycl as plugin

    from irframework.platform import BUILT_IN

    chosen = {p.name: plugin.irframework_default_priorities(p, "eager") for p in BUILT_IN}
    assert chosen == {"xpu": {"*": ("xpu_kernels",)}, "rocm": None, "cuda": None, "cpu": None}
