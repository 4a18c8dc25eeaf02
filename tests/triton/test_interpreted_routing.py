"""The kernel that chooses experts, run by Triton's interpreter on the CPU: the same experts as native's."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GROUPED = [  # experts, top_k, groups, top_groups
    (32, 4, 8, 4),
    (20, 6, 4, 2),
    (15, 2, 5, 3),
    (8, 8, 1, 1),
    (6, 3, 6, 3),
]


@pytest.fixture
def kernels():
    from irframework_triton_kernels import routing

    return routing


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def assert_as_native(kernels, name: str, *arguments: object) -> None:
    (weights, ids), (want, want_ids) = (f(*arguments) for f in (getattr(kernels, name), getattr(ir.ops, name).native))
    assert ids.dtype == torch.int32
    assert torch.equal(ids, want_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(("renormalize", "scoring"), [(True, "softmax"), (False, "sigmoid")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_experts_with_the_largest_logits_are_chosen(kernels, dtype, renormalize, scoring):
    for experts, top_k in ((60, 4), (1, 1)):
        logits = 3 * random(5, experts, dtype=dtype)
        logits[1:] = logits[1:].round()  # many are equal
        assert_as_native(kernels, "fused_topk", logits, top_k, renormalize, scoring)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("experts", "top_k", "groups", "top_groups"), GROUPED)
def test_the_best_experts_of_the_best_groups_are_chosen(kernels, experts, top_k, groups, top_groups, with_bias):
    dtype = FLOATS[top_k % 3]
    bias = random(experts, dtype=dtype) / 4 if with_bias else None
    logits = random(5, experts, dtype=dtype)
    logits[1:] = logits[1:].round()
    for scoring, renormalize, factor in (("softmax", True, 1), ("sigmoid", False, 2.5)):
        rest = (top_k, groups, top_groups, renormalize, scoring, bias, factor)
        assert_as_native(kernels, "grouped_topk", logits, *rest)


def test_any_shape_and_stride_is_taken(kernels):
    for logits in (random(16), random(2, 3, 16), random(0, 16), random(5, 40)[:, 3:19]):
        assert_as_native(kernels, "fused_topk", logits, 3, True)
        assert_as_native(kernels, "grouped_topk", logits, 3, 4, 2)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -0.0, 80.0])
def test_logits_that_are_not_finite_or_saturate_give_what_native_gives(kernels, value):
    logits = random(4, 16)
    logits[1, 3] = logits[2, 3::2] = value
    logits[3] = value
    logits[0, 5:7] = torch.tensor([0.0, -0.0])
    for scoring in ("softmax", "sigmoid"):
        assert_as_native(kernels, "fused_topk", logits, 3, True, scoring)
        for bias in (None, random(16)):
            assert_as_native(kernels, "grouped_topk", logits, 3, 4, 2, True, scoring, bias)


def test_groups_that_are_not_chosen_count_as_minus_infinity(kernels):
    """So do experts of chosen groups whose bias says so: the lower number is chosen first."""
    bias = torch.full((8,), -torch.inf)
    bias[5:] = torch.tensor([-5.0, -torch.inf, -4.0])
    assert_as_native(kernels, "grouped_topk", random(3, 8), 3, 2, 1, False, "sigmoid", bias)
    assert_as_native(kernels, "grouped_topk", random(3, 8), 4, 4, 2, False, "sigmoid", -torch.ones(8))


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    kernels.launches()
    ops, logits = torch.ops.irframework_triton_kernels, random(3, 8)
    torch.library.opcheck(ops.fused_topk.default, (logits, 2, True, "softmax"), test_utils="test_schema")
    args = (logits, 2, 4, 2, True, "sigmoid", torch.ones(8), 2.5)
    torch.library.opcheck(ops.grouped_topk.default, args, test_utils="test_schema")
