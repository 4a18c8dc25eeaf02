"""What makes Dynamo compile again, and what does not."""

import threading

import torch
from compiler_support import lowered, tensors

import irframework as ir


class Counting:
    """A backend that counts its compiles."""

    def __init__(self):
        self.compiles = 0

    def __call__(self, module, inputs):
        self.compiles += 1
        return lowered(module, inputs)


def compiled(op):
    backend = Counting()
    return torch.compile(lambda x: op(x), backend=backend), backend


def provide(op, **values):
    for name, value in values.items():
        _register(op, name, value)


def _register(op, name, value):
    @op.register_impl(name)
    def constant(x, factor=2.0):
        return x * 0 + value


def test_a_changed_priority_compiles_once_per_choice(scale):
    provide(scale, seven=7, eight=8)
    f, backend = compiled(scale)
    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(3):
            for name, value in (("seven", 7), ("eight", 8), ("native", 2)):
                with ir.priority({scale.name: [name]}):
                    assert f(x)[0] == value
    assert backend.compiles == 3


def test_priorities_of_another_thread_count_there_only(scale):
    provide(scale, seven=7)
    f, _ = compiled(scale)
    found = []

    def other():
        with torch.no_grad(), ir.priority({scale.name: ["native"]}):
            found.append(f(torch.ones(2))[0].item())

    with torch.no_grad(), ir.priority({scale.name: ["seven"]}):
        assert f(torch.ones(2))[0] == 7
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert f(torch.ones(2))[0] == 7
    assert found == [2]


def test_an_implementation_registered_after_the_compile_is_seen(scale):
    f, _ = compiled(scale)
    with torch.no_grad():
        assert f(torch.ones(2))[0] == 2
        provide(scale, seven=7)
        with ir.priority({scale.name: ["seven"]}):
            assert f(torch.ones(2))[0] == 7


def test_an_unrelated_op_declared_later_compiles_nothing_again(scale):
    f, backend = compiled(scale)
    with torch.no_grad():
        f(torch.ones(2))
        ir.register_op(name=f"{scale.name}_later")(scale.native)
        f(torch.ones(2))
    assert backend.compiles == 1


def test_equal_priorities_written_anew_compile_nothing_again(scale):
    provide(scale, seven=7)
    f, backend = compiled(scale)
    with torch.no_grad():
        for _ in range(3):
            with ir.priority({scale.name: ["seven"]}):
                f(torch.ones(2))
    assert backend.compiles == 1


def test_disjoint_inputs_do_not_compile_again(add):
    backend = Counting()
    f = torch.compile(lambda x, r, w: add.op.maybe_inplace(x, r, w), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            f(*tensors((4, 8), (4, 8), (8,)))
    assert backend.compiles == 1


def test_the_backward_keeps_the_priorities_of_its_forward(scale):
    calls = []
    inner = ir.register_op(name=f"{scale.name}_grad")(scale.native)

    @inner.register_impl("seen")
    def seen(x, factor=2.0):
        calls.append(factor)
        return x * factor

    @scale.register_backward
    def backward(grads, x, factor):
        return (inner(grads[0], factor),)

    x = torch.ones(3, requires_grad=True)
    f = torch.compile(lambda x: scale(x, 3.0), backend="irframework")
    with torch._inductor.config.patch(fx_graph_cache=False), ir.priority({inner.name: ["seen"]}):
        y = f(x)
    calls.clear()
    with torch._inductor.config.patch(fx_graph_cache=False), ir.priority({inner.name: ["native"]}):
        y.sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
    assert ir.last_report().selected_impls[inner.name] != {}
    assert set(ir.last_report().selected_impls[inner.name].values()) == {"seen"}


def test_eager_calls_between_compiled_ones_compile_nothing_again(scale):
    provide(scale, seven=7)
    f, backend = compiled(scale)
    with torch.no_grad():
        f(torch.ones(2))
        scale(torch.ones(2))  # generates a dispatcher
        with ir.priority({scale.name: ["seven"]}):
            for _ in range(40):  # another one takes its place
                scale(torch.ones(2))
        f(torch.ones(2))
    assert backend.compiles == 1


def test_eager_donating_calls_between_compiled_ones_compile_nothing_again(add):
    backend = Counting()
    f = torch.compile(lambda *a: add.op.maybe_inplace(*a), backend=backend)
    with torch.no_grad():
        for _ in range(2):
            f(*tensors((4, 8), (4, 8), (8,)))
            add.op.maybe_inplace(*tensors((4, 8), (4, 8), (8,)))
    assert backend.compiles == 1
