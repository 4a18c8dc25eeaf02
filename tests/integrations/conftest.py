"""Tiny models of every supported family, with weights that tell the spellings of a norm apart."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from irframework.integrations.model_source import load_model


@pytest.fixture
def tiny() -> Callable[..., nn.Module]:
    def make(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = load_model(f"random:{family}-tiny", dtype=dtype).model
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # fresh norms are ones or zeros, with which any formula is right
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        return model

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(2))
