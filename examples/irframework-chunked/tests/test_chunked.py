import pytest
import torch

import irframework as ir

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (0, 64), (37, 4096), (2, 3, 100)])
def test_rms_norm_agrees_with_native(shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider == "chunked"
    tolerance = ir.ops.rms_norm.get_tolerance(dtype)
    torch.testing.assert_close(
        ir.ops.rms_norm(x, weight, 1e-6),
        ir.ops.rms_norm.native(x, weight, 1e-6),
        atol=tolerance.atol,
        rtol=tolerance.rtol,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_agrees_with_native_and_leaves_its_input_alone(dtype):
    x, cap = ir.ops.soft_cap.generate_inputs(shape=(5, 7), dtype=dtype)
    before = x.clone()
    torch.testing.assert_close(ir.ops.soft_cap(x, cap), ir.ops.soft_cap.native(x, cap))
    assert torch.equal(x, before)


def test_soft_cap_reuses_the_memory_of_a_donated_input():
    x, cap = ir.ops.soft_cap.generate_inputs(shape=(5, 7))
    assert ir.ops.soft_cap.maybe_inplace(x, cap).data_ptr() == x.data_ptr()


def test_a_weight_of_another_dtype_is_declined_with_the_reason():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).half()
    answer = ir.ops.rms_norm.impls["chunked"].supports_args(x, weight, 1e-6)
    assert answer == ir.reject("weight is torch.float16, needs torch.bfloat16 or torch.float32")


def test_compiled_code_calls_the_kernel_for_any_number_of_rows():
    norm = torch.compile(lambda x, w: ir.ops.rms_norm(x, w, 1e-6), backend="irframework", dynamic=True)
    weight = torch.randn(64)
    with ir.priority(rms_norm="chunked"):
        for rows in (4, 7):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(norm(x, weight), ir.ops.rms_norm.native(x, weight, 1e-6))
        assert set(ir.last_report().selected_impls["rms_norm"].values()) == {"chunked"}
