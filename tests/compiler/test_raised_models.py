"""Models of transformers, as they are, become IR ops: which, how often, and that they compute the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import fused_in, traced
from raised_models import RAISED, raised
from torch import Tensor, nn
from torch._inductor import config

import irframework as ir
from irframework.compiler.report import last_report

pytest.importorskip("transformers", reason="transformers is not installed")

NATIVELY = {name: ["native"] for name in ir.ops.__all__}
OPS = tuple(sorted({name for ops in RAISED.values() for name in ops}))
BY_K = NATIVELY | {name: ["k"] for name in OPS}
DOCS = Path(__file__).parents[2] / "docs" / "fusion.md"


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    """A provider `k` of all ops that are raised, which computes what native computes."""
    for name in OPS:
        op = getattr(ir.ops, name)
        op.register_impl("k")(op.native)
    yield
    for name in OPS:
        getattr(ir.ops, name).unregister_impl("k")


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model, with weights that tell the spellings of a norm apart."""
    from irframework.integrations.model_source import load_model

    model = load_model(f"random:{family}-tiny", dtype=dtype).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


def logits(model: Any, priority: dict[str, list[str]]) -> Tensor:
    with torch.no_grad(), ir.priority(priority):
        found: Tensor = model(IDS, use_cache=False).logits
    return found


IDS = torch.tensor([[5, 17, 301, 4, 99, 250, 7], [8, 8, 400, 11, 3, 77, 123]])


def searched(model: nn.Module, priority: dict[str, list[str]]) -> tuple[dict[str, int], Tensor]:
    """What is raised in the graph of a model, and the logits that the graph then computes."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())

    def program(held: dict[str, Tensor], ids: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, held, (ids,), {"use_cache": False}).logits
        return found

    module = traced(program, held, IDS)
    with torch.no_grad(), ir.priority(priority):
        report = fused_in(module)
        return dict(report.fusions), module(held, IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", RAISED)
def test_a_plain_model_becomes_ops_that_round_where_it_does(family, dtype):
    model = model_of(family, dtype)
    fusions, got = searched(model, BY_K)
    assert fusions == raised(family, dtype != torch.float32)
    torch.testing.assert_close(got, logits(model, NATIVELY), rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


def test_a_gate_is_raised_with_the_product_in_front_of_it_where_a_provider_has_both():
    op = ir.ops.linear_silu_and_mul
    op.register_impl("k")(op.native)
    try:
        model = model_of("phi3", torch.bfloat16)
        fusions, got = searched(model, BY_K | {op.name: ["k"]})
    finally:
        op.unregister_impl("k")
    wanted = dict(raised("phi3", True))
    gates = wanted.pop("silu_and_mul")
    assert fusions == wanted | {op.name: gates}
    torch.testing.assert_close(got, logits(model, NATIVELY), rtol=0, atol=0)


def test_what_only_native_would_run_stays():
    model = model_of("llama")
    assert searched(model, NATIVELY)[0] == {}
    assert searched(model, NATIVELY | {"silu_mul": ["k"]})[0] == {"silu_mul": 2}


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_both_backends_raise_the_same(backend):
    ir.install()
    model = model_of("gemma3", torch.bfloat16)
    with config.patch(fallback_by_default=True):  # no C++ compiler: what is tested is in front of it
        got = logits(torch.compile(model, backend=backend, fullgraph=True), BY_K)
    report = last_report()
    assert report is not None
    assert report.fusions == raised("gemma3", True)
    torch.testing.assert_close(got, logits(model, NATIVELY), rtol=0.05, atol=0.05)


def test_the_page_says_what_is_raised():
    section = DOCS.read_text().split("## What is raised in transformers' models")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    shown = {family: (words(whole), words(whole if half == "the same" else half)) for family, whole, half in rows}
    assert shown == {family: (set(raised(family, False)), set(raised(family, True))) for family in RAISED}


def words(cell: str) -> set[str]:
    return {word.strip(" `") for word in cell.split(",")}
