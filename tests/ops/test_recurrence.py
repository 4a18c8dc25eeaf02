"""The recurrence behind the scans: against a loop, its derivatives, and how graphs hold it."""

import pytest
import torch
from torch.testing import assert_close

import irframework as ir
from irframework.ops.recurrence import recurrence

pytestmark = pytest.mark.usefixtures("seeded")


def starting(places, *others):
    start = torch.zeros(places, dtype=torch.bool)
    start[[place for place in (0, *others) if place < places]] = True
    return start


def by_hand(decay, added, start):
    states = []
    for place in range(added.shape[0]):
        states.append(added[place] if start[place] else added[place] + decay[place] * states[-1])
    return torch.stack(states) if states else added.clone()


@pytest.mark.parametrize("places", [0, 1, 2, 3, 7, 8, 9, 33])
@pytest.mark.parametrize("broadcast", [True, False])
def test_it_is_a_loop(places, broadcast):
    decay, added = torch.rand(places, 2, 1 if broadcast else 3).double(), torch.randn(places, 2, 3).double()
    start = starting(places, 3, 4, 20)
    assert_close(recurrence(decay, added, start), by_hand(decay, added, start))


@pytest.mark.parametrize("broadcast", [True, False])
def test_its_first_and_second_derivatives_are_right(broadcast):
    decay, added = torch.rand(6, 2, 1 if broadcast else 2).double(), torch.randn(6, 2, 2).double()
    args = decay.requires_grad_(), added.requires_grad_(), starting(6, 2)
    assert torch.autograd.gradcheck(recurrence, args)
    assert torch.autograd.gradgradcheck(recurrence, args)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_passes_a_start_forwards_or_backwards(bad):
    decay, added = torch.rand(9, 2).requires_grad_(), torch.randn(9, 2)
    added[4] = bad
    states = recurrence(decay, added.requires_grad_(), starting(9, 3, 6))
    assert states[:3].isfinite().all()
    assert states[6:].isfinite().all()
    states[6:].sum().backward()
    assert added.grad.isfinite().all()
    assert decay.grad[[0, 1, 2, 6, 7, 8]].isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on the first use
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_see_torchs_own_ops(transform):
    decay, added, start = torch.rand(3, 7, 2).double(), torch.randn(3, 7, 2).double(), starting(7, 3)
    if transform == "vmap":
        got = torch.vmap(recurrence, (0, 0, None))(decay, added, start)
        assert_close(got, torch.stack([by_hand(d, a, start) for d, a in zip(decay, added, strict=True)]))
    else:
        one = decay[0], added[0]
        got = torch.func.jvp(lambda d, a: recurrence(d, a, start), one, one)
        assert_close(got, torch.func.jvp(lambda d, a: by_hand(d, a, start), one, one))


@pytest.mark.parametrize("name", ["selective_scan", "mamba2_chunk_scan"])
def test_a_graph_for_any_number_of_tokens_holds_a_scan_in_few_nodes(name):
    """Written out, the rounds of a symbolic number of blocks made thousands of nodes, and minutes of compiling."""
    nodes = []

    def count(module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, arguments):
            lowered = ir.compiler.lower(graph, arguments)
            nodes.append([node.target for node in lowered.graph.nodes if node.op == "call_function"])
            return lowered.forward

        return aot_autograd(fw_compiler=keep)(module, inputs)

    op = getattr(ir.ops, name)
    args = op.generate_inputs(shape=(40, 64), dtype=torch.float32)
    torch._dynamo.reset()
    with torch.no_grad(), ir.priority({name: "native"}):
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.shape[0] == 40:
                torch._dynamo.mark_dynamic(tensor, 0)
        compiled = torch.compile(op, backend=count, fullgraph=True)
        assert_close(compiled(*args), op(*args))
    assert len(nodes[0]) < 250
    assert torch.ops.irframework_native.recurrence.default in nodes[0]
