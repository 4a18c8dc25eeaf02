import os
import subprocess
import sys

import torch

import irframework as ir


def norm(x, weight):
    return ir.ops.rms_norm(x, weight, 1e-6)


X, WEIGHT = torch.randn(4, 64), torch.randn(64)


def test_the_platform_is_current_where_the_device_is():
    assert ir.current_platform().name == "standin"


def test_without_the_device_the_cpu_is_current_and_the_kernel_says_why_it_does_not_run():
    code = (
        "import torch, irframework as ir;"
        "print(ir.current_platform().name);"
        "print(ir.ops.rms_norm.impls['standin'].unsupported_reason)"
    )
    environment = {**os.environ, "STANDIN_DEVICES": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "cpu\nno standin device on this machine (STANDIN_DEVICES is 0)\n"


def test_eager_and_compiled_code_have_priorities_of_their_own():
    torch.compile(lambda x: ir.ops.silu_and_mul(x), backend="irframework")(X)
    assert set(ir.last_report().selected_impls["silu_and_mul"].values()) == {"native"}
    torch.compile(norm, backend="irframework")(X, WEIGHT)
    assert set(ir.last_report().selected_impls["rms_norm"].values()) == {"standin"}


def test_the_kernel_agrees_with_native_eager_and_compiled():
    expected = ir.ops.rms_norm.native(X, WEIGHT, 1e-6)
    assert ir.ops.rms_norm.dispatch(X, WEIGHT, 1e-6).provider == "standin"
    torch.testing.assert_close(norm(X, WEIGHT), expected)
    torch.testing.assert_close(torch.compile(norm, backend="irframework")(X, WEIGHT), expected)


def test_the_pass_sees_the_ops_before_they_are_lowered():
    from irframework_standin.passes import CountOps

    CountOps.seen.clear()
    torch.compile(lambda x, w: norm(norm(x, w), w), backend="irframework")(X, WEIGHT)
    assert CountOps.seen["rms_norm"] == 2


def test_the_configuration_is_checked_by_the_platform():
    ir.configure(ir.KernelConfig(autotune=True))
    assert not ir.current_config().autotune
    ir.configure(ir.KernelConfig())


def test_compiled_graphs_go_to_the_compiler_of_the_platform_without_ir_ops():
    from irframework_standin.compiler import compiled

    compiled.clear()
    torch.compile(lambda x, w: norm(x, w) + 1, backend="irframework")(X, WEIGHT)
    assert len(compiled) == 1
    assert "irframework" not in str(compiled[0].graph)
