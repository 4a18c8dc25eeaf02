"""When an element is right."""

import torch

from irframework.testing.accuracy import distance
from irframework.tolerance import Tolerance

TIGHT = Tolerance(1e-6, 1e-6)


def cancelling():
    """Differences of large products in float32, rounded once less than native does, beside native's and exact ones."""
    a, b, cos, sin = (torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    a, b = a * 1e4, a * 1e4 * cos / sin + b
    exact = a.double() * cos.double() - b.double() * sin.double()
    native = a * cos - b * sin
    fused = (a.double() * cos.double() - (b * sin).double()).float()
    return fused, native, exact


def test_other_rounding_where_terms_cancel_is_right():
    fused, native, exact = cancelling()
    assert not torch.allclose(fused, native, atol=TIGHT.atol, rtol=TIGHT.rtol)
    assert distance(fused, native, exact, TIGHT) is None


def test_a_larger_error_than_rounding_makes_is_wrong():
    _, native, exact = cancelling()
    off = 3 * (native.double() - exact).abs().amax()
    found = distance((exact + off).float(), native, exact, TIGHT)
    assert found is not None
    assert found.wrong == "1024 of 1024"


def test_native_that_is_exact_allows_nothing_more():
    exact = torch.ones(2, 8, dtype=torch.float64)
    got = torch.ones(2, 8)
    got[1, 3] += 1e-4
    found = distance(got, torch.ones(2, 8), exact, TIGHT)
    assert found is not None
    assert found.wrong == "1 of 16"


FP8 = torch.float8_e4m3fn


def test_small_codes_of_sums_that_cancel_may_be_several_steps_apart():
    native = torch.tensor([[2.0**-7, 1.0]]).to(FP8)
    got = torch.tensor([[-(2.0**-7), 1.0]]).to(FP8)
    assert distance(got, native, None, Tolerance(2.0**-4, 2.0**-3)) is None
    assert distance(got, native, None, Tolerance(2.0**-9, 2.0**-3)) is not None


def test_large_codes_of_sums_that_cancel_are_one_step_apart():
    native, got = torch.tensor([[8.0]]).to(FP8), torch.tensor([[10.0]]).to(FP8)
    assert distance(got, native, None, Tolerance(2.0**-4, 2.0**-3)) is not None
