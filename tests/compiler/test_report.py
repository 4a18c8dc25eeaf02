"""What the report of a compile says."""

import torch
from compiler_support import report, run, tensors

import irframework as ir
from irframework.compiler.report import Report, graph_text

ARGUMENTS = ((4, 8), (4, 8), (8,))


def test_the_report_names_providers_by_node(add):
    with add.priority("inp"):
        run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    assert set(report().selected_impls) == {add.op.name}
    assert list(report().selected_impls[add.op.name].values()) == ["inp"]


def test_the_summary_is_one_line(add):
    with add.priority("inp"):
        run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    summary = report().summary()
    assert f"{add.op.name} 1xinp" in summary
    assert "\n" not in summary


def test_graphs_show_the_stages(add):
    with add.priority("inp"):
        run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    stages = list(report().graphs)
    assert stages == ["before lowering", "functional ops lowered", "lowered"]
    assert f"irframework.{add.op.name}" in report().graphs["before lowering"]
    assert "k_" in report().graphs["lowered"]


def test_a_graph_is_shown_with_dtypes_shapes_and_strides():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, dtype=torch.bfloat16)
    graph.output((x,))
    assert graph_text(graph).splitlines()[0] == "x: bf16[4, 8][8, 1] = input"


def test_a_backend_that_runs_ops_as_they_are_leaves_no_report(add):
    before = ir.last_report()
    run(lambda *a: add.op(*a), *tensors(*ARGUMENTS), backend="aot_eager")
    assert ir.last_report() is before


def test_forward_and_backward_share_a_report(scale):
    x = torch.ones(3, requires_grad=True)
    from compiler_support import lowered

    torch.compile(lambda x: scale(x).exp(), backend=lowered)(x).sum().backward()
    assert list(report().selected_impls) == [scale.name]
    assert ir.last_report() in ir.compiler.recent_reports()


def test_a_report_can_be_written_as_json(add):
    import json

    with add.priority("inp"):
        run(lambda *a: add.op.maybe_inplace(*a), *tensors(*ARGUMENTS))
    assert json.loads(json.dumps(report().to_dict()))["clones_inserted"] == 2


def test_an_empty_report_says_so():
    assert Report().summary().startswith("lowered nothing; fused nothing")


def test_what_lower_does_outside_of_dynamo_is_in_one_report(add, scale):
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda x, r, w: (add.op(x, r, w), scale(x)), tracing_mode="fake")(*tensors(*ARGUMENTS))
    before = len(ir.compiler.recent_reports())
    with add.priority("inp"):
        ir.compiler.lower(module)
    assert set(report().selected_impls) == {add.op.name, scale.name}
    assert len(ir.compiler.recent_reports()) in (before + 1, 64)
