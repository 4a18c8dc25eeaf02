"""Reports beside Inductor's cache: what a compile that runs no pass can still say."""

import json
import os
from dataclasses import fields, replace

import pytest
import torch
from compiler_support import lowered
from torch._inductor import config

import irframework as ir
from irframework.compiler import kept_reports
from irframework.compiler.clones import KeptCopy
from irframework.compiler.report import Donation, MissedFusion, Report


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty Inductor cache for one test; the folder of our reports in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(fx_graph_cache=True):
        yield tmp_path / "irframework"


@pytest.fixture
def product(scale):
    """An op that Inductor compiles without a C++ compiler: a matrix product, and a provider with another one."""
    op = ir.register_op(name=f"{scale.name}_product")(product_of)
    op.register_impl("other", supports_args=ir.supports(ndim=2))(lambda x: torch.mm(x, x.t()))
    op.register_impl("never", supports_args=ir.supports(ndim=7))(lambda x: torch.mm(x, x))
    return op


def product_of(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


def full(op):
    """A report with something in every field."""
    x = torch.ones(2, 2)
    with ir.priority({op.name: ["never", "other"]}):
        decision = op.explain(x)
    return Report(
        selected_impls={op.name: {"a": "other"}},
        decisions={"a": decision},
        fusions={op.name: 2},
        missed_fusions=[MissedFusion(op.name, "n", "why")],
        donated=[Donation(op.name, "x", "l_x_", "input"), Donation(op.name, "x", "l_y_", "kept", "a Parameter")],
        clones_inserted=3,
        clones_removed=2,
        kept_copies=[KeptCopy("clone", op.name, "b reads it")],
        graphs={"before lowering": "x = input"},
        kept_as="name",
    )


def test_what_was_kept_is_read_back(folder, product):
    report = full(product)
    kept_reports.keep(report)
    again = Report(kept_as="name")
    kept_reports.restore(again)
    assert again == report
    assert str(again.decisions["a"]) == str(report.decisions["a"])


def test_every_field_of_a_report_is_kept_or_said_not_to_be():
    said = {*kept_reports._PLAIN, *kept_reports._RECORDS, *kept_reports.NOT_KEPT, "decisions"}
    assert said == {field.name for field in fields(Report)}


def damaged(text, what):
    data = json.loads(text)
    if what == "truncated":
        return text[: len(text) // 2]
    if what == "of another kind":
        return "[]"
    if what == "without a field":
        del data["graphs"]
    elif what == "a provider that is not here":
        data["decisions"]["a"]["provider"] = "gone"
    elif what == "an op that is not here":
        data["decisions"]["a"]["op"] = "gone"
    elif what == "a record with another field":
        data["kept_copies"][0]["since"] = 1
    else:
        data["decisions"] = 7
    return json.dumps(data)


@pytest.mark.parametrize(
    "what",
    ["truncated", "of another kind", "without a field", "a provider that is not here", "an op that is not here",
     "a record with another field", "decisions of another kind"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_leaves_the_report_empty(folder, product, what):
    kept_reports.keep(full(product))
    (place,) = folder.iterdir()
    place.write_text(damaged(place.read_text(), what))
    again = Report(kept_as="name", from_cache=True)
    kept_reports.restore(again)
    assert again == Report(kept_as="name", from_cache=True)
    assert again.summary() == "compiled from cache; passes not run; no report was kept with it"


def test_a_file_that_is_not_there_leaves_the_report_empty(folder):
    again = Report(kept_as="name")
    kept_reports.restore(again)
    assert again == Report(kept_as="name")


@pytest.mark.parametrize("switch", ["fx_graph_cache", "force_disable_caches"])
def test_nothing_is_written_or_read_where_inductor_caches_nothing(folder, product, switch):
    kept_reports.keep(full(product))
    again = Report(kept_as="name")
    with config.patch({switch: switch != "fx_graph_cache"}):
        kept_reports.restore(again)
        kept_reports.keep(replace(full(product), kept_as="second"))
    assert again == Report(kept_as="name")
    assert [place.name for place in folder.iterdir()] == ["name.json"]


def test_a_report_that_is_too_large_is_kept_without_its_graphs(folder, product, monkeypatch):
    report = full(product)
    report.graphs["lowered"] = "x" * 10_000
    monkeypatch.setattr(kept_reports, "_MAX_BYTES", 5_000)
    kept_reports.keep(report)
    again = Report(kept_as="name")
    kept_reports.restore(again)
    assert (again.graphs, again.decisions) == ({}, report.decisions)


def test_the_oldest_reports_go_where_there_are_too_many(folder, product, monkeypatch):
    monkeypatch.setattr(kept_reports, "_MAX_FILES", 3)
    for number in range(5):
        kept_reports.keep(replace(full(product), kept_as=f"n{number}"))
        os.utime(folder / f"n{number}.json", (number, number))
    assert sorted(place.name for place in folder.iterdir()) == ["n2.json", "n3.json", "n4.json"]


def test_a_write_that_fails_leaves_the_earlier_report_and_nothing_else(folder, product, monkeypatch):
    kept_reports.keep(full(product))
    before = (folder / "name.json").read_text()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    kept_reports.keep(replace(full(product), clones_inserted=9))
    assert [place.name for place in folder.iterdir()] == ["name.json"]
    assert (folder / "name.json").read_text() == before


def test_a_folder_that_cannot_be_made_costs_nothing(folder, product):
    folder.write_text("a file in its place")
    kept_reports.keep(full(product))
    assert folder.is_file()


def compile_anew(op, x, backend, **options):
    torch._dynamo.reset()
    torch.compile(lambda x: op(x), backend=backend, **options)(x)
    return ir.last_report()


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_a_compile_from_the_cache_says_what_was_decided(folder, product, backend):
    x = torch.arange(4.0).reshape(2, 2)
    with torch.no_grad(), ir.priority({product.name: ["never", "other"]}):
        first = compile_anew(product, x, backend)
        second = compile_anew(product, x, backend)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert [str(decision) for decision in second.decisions.values()] == [str(d) for d in first.decisions.values()]
    assert next(iter(second.decisions.values())).candidates[0].reason
    assert (second.selected_impls, second.graphs) == (first.selected_impls, first.graphs)
    assert second.summary() == (
        "compiled from cache; passes not run; when they ran: "
        f"lowered {product.name} 1xother; fused nothing; copies 0 inserted, 0 removed"
    )


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_forward_and_backward_of_a_training_graph_are_kept_together(folder, product, backend):
    def train():
        torch._dynamo.reset()
        x = torch.arange(4.0).reshape(2, 2).requires_grad_()
        torch.compile(lambda x: product(product(x)), backend=backend)(x).sum().backward()
        return ir.last_report()

    inner = ir.register_op(name=f"{product.name}_grad")(product_of)
    product.register_backward(lambda grads, x: (inner(grads[0]),))
    first, second = train(), train()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert set(second.selected_impls) == {product.name, inner.name}
    assert second.selected_impls == first.selected_impls


def test_reports_of_different_compiles_have_different_names(folder, product):
    x = torch.ones(4, 4)
    with torch.no_grad():
        names = [
            compile_anew(product, x, "irframework").kept_as,
            compile_anew(product, x[:2, :2], "irframework").kept_as,
            compile_anew(product, x.t()[:, ::1].double(), "irframework").kept_as,
            compile_anew(
                product, x, "irframework", options={"ir_op_priority": {product.name: ["native"]}}
            ).kept_as,
        ]  # fmt: skip
        with ir.priority({product.name: ["native"]}):
            names.append(compile_anew(product, x, "inductor").kept_as)
    names.append(compile_anew(product, x.clone().requires_grad_(), "inductor").kept_as)
    assert None not in names
    assert len({*names}) == len(names)


def test_graphs_of_other_compilers_are_not_kept(folder, product):
    with torch.no_grad():
        report = compile_anew(product, torch.ones(2, 2), lowered)
    assert report.decisions
    assert report.kept_as is None
    assert not folder.exists()
