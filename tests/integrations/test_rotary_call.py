from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from irframework.integrations import rotary_call, verification


def rotated(function: Callable[..., tuple[Tensor, Tensor]], batch_of_angles: int, dim: int) -> tuple[Tensor, Tensor]:
    like = torch.empty(0, dtype=torch.float64)
    shape = (3, 2, 5, 16) if dim == 1 else (3, 5, 2, 16)
    q, k = (verification.random_input(shape, like, seed) for seed in (1, 2))
    angles = verification.random_input((batch_of_angles, 5, 8), like, 3).repeat(1, 1, 2)
    return function(q, k, angles.cos(), angles.sin(), unsqueeze_dim=dim)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("batch_of_angles", [1, 3])
def test_the_op_is_the_library_function(batch_of_angles: int, dim: int) -> None:
    expected = rotated(apply_rotary_pos_emb, batch_of_angles, dim)
    actual = rotated(rotary_call.apply_rotary, batch_of_angles, dim)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_neighbouring_pairs_are_recognised() -> None:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as pairs

    assert verification.rotates_halves(pairs, 16, 16) is False


def test_a_forward_that_calls_no_rotary_is_refused() -> None:
    with pytest.raises(TypeError, match="does not call"):
        rotary_call.with_ir_rotary(torch.nn.Linear.forward, True)


def test_the_library_function_is_not_changed() -> None:
    from transformers.models.llama import modeling_llama

    rotary_call.with_ir_rotary(modeling_llama.LlamaAttention.forward, True)
    assert modeling_llama.apply_rotary_pos_emb is apply_rotary_pos_emb
