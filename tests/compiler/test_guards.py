"""What makes Dynamo compile again, and what does not."""

import asyncio
import threading

import pytest
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


def test_tasks_choose_apart_and_each_choice_compiles_once(scale):
    provide(scale, seven=7, eight=8)
    f, backend = compiled(scale)

    async def task(name):
        found = []
        for _ in range(3):
            with ir.priority({scale.name: [name]}):
                await asyncio.sleep(0)  # the other task runs, under its own priority
                found.append(f(torch.ones(2))[0].item())
        return found

    async def both():
        return await asyncio.gather(task("seven"), task("eight"))

    with torch.no_grad():
        assert asyncio.run(both()) == [[7.0] * 3, [8.0] * 3]
    assert backend.compiles == 2


def test_a_thread_uses_what_another_thread_compiled_for_the_same_choice(scale):
    provide(scale, seven=7)
    f, backend = compiled(scale)
    found = []

    def other():
        with torch.no_grad(), ir.priority({scale.name: ["seven"]}):
            found.append(f(torch.ones(2))[0].item())

    with torch.no_grad(), ir.priority({scale.name: ["seven"]}):
        f(torch.ones(2))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (found, backend.compiles) == ([7.0], 1)


def test_a_configuration_changed_after_the_compile_compiles_once_per_choice(scale, configured):
    provide(scale, seven=7, eight=8)
    f, backend = compiled(scale)
    found = []
    with torch.no_grad():
        for name in ("seven", "eight", "seven", "eight"):
            configured(ir_op_priority={scale.name: [name]})
            found.append(f(torch.ones(2))[0].item())
    assert (found, backend.compiles) == ([7.0, 8.0, 7.0, 8.0], 2)


def test_a_backward_registered_after_the_compile_is_seen(scale):
    backend = Counting()
    f = torch.compile(lambda x: scale(x), backend=backend)
    for expected in (2.0, 5.0):
        x = torch.ones(2, requires_grad=True)
        f(x).sum().backward()
        assert x.grad.tolist() == [expected] * 2
        scale.register_backward(lambda grads, x, factor: (grads[0] * 5,))


def test_the_choice_of_an_op_inside_an_implementation_is_watched(scale):
    inner = ir.register_op(name=f"{scale.name}_inner")(scale.native)
    provide(inner, seven=7, eight=8)
    scale.register_impl("nest")(lambda x, factor=2.0: inner(x, factor))
    f, backend = compiled(scale)
    with torch.no_grad():
        for name, value in (("seven", 7), ("eight", 8), ("seven", 7)):
            with ir.priority({scale.name: ["nest"], inner.name: [name]}):
                assert f(torch.ones(2))[0] == value
    assert backend.compiles == 2


def within(op):
    """Functions that enter `ir.priority` inside: each must give 8."""

    def block(x):
        y = x * 2
        with ir.priority({op.name: ["seven"]}):
            y = op(y)
        return y + 1

    def donating(x):
        with ir.priority({op.name: ["seven"]}):
            return op.maybe_inplace(x * 2) + 1

    def torch_name(x):
        with ir.priority({op.name: ["seven"]}):
            return op.torch_op(x) + 1

    @ir.priority({op.name: ["seven"]})
    def seven(x):
        return op(x)

    def decorated(x):
        return seven(x * 2) + 1

    def decorating(x):
        return ir.priority({op.name: ["seven"]})(lambda x: op(x))(x) + 1

    return {each.__name__: each for each in (block, donating, torch_name, decorated, decorating)}


@pytest.mark.parametrize("kind", ["block", "donating", "torch_name", "decorated", "decorating"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after a break
def test_a_priority_inside_a_compiled_function_is_not_ignored(scale, kind, grad):
    provide(scale, seven=7)
    f = torch.compile(within(scale)[kind], backend=lowered)
    for _ in range(3):
        with torch.set_grad_enabled(grad), ir.priority({scale.name: ["native"]}):
            assert f(torch.ones(2, requires_grad=grad))[0] == 8


@pytest.mark.parametrize("kind", ["block", "decorated", "decorating"])
def test_under_fullgraph_a_priority_inside_a_compiled_function_is_an_error(scale, kind):
    provide(scale, seven=7)
    f = torch.compile(within(scale)[kind], backend=lowered, fullgraph=True)
    with pytest.raises(Exception, match="belongs around a compiled function, not inside it"):
        f(torch.ones(2))


def test_what_a_compiled_function_calls_uncompiled_is_decided_anew_each_time(scale):
    provide(scale, seven=7, eight=8)

    def f(x):
        with scale.unknown_to_dynamo:
            return scale(x)

    scale.unknown_to_dynamo = ir.priority({})
    f = torch.compile(f, backend=lowered)
    with torch.no_grad():
        for name, value in (("seven", 7), ("eight", 8), ("native", 2), ("seven", 7)):
            with ir.priority({scale.name: [name]}):
                assert f(torch.ones(2))[0] == value


def many(op, count):
    for number in range(count):
        _register(op, f"p{number}", number)
    return [(f"p{number}", number) for number in range(count)]


def test_more_choices_than_dynamo_compiles_are_right_and_the_warning_says_why(scale, caplog):
    f, backend = compiled(scale)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for name, value in many(scale, 4) * 2:
            with ir.priority({scale.name: [name]}):
                assert f(torch.ones(2))[0] == value
    assert backend.compiles == 2
    assert "kernel priorities differ from those this was compiled for" in caplog.text


def test_more_choices_than_dynamo_compiles_are_an_error_under_fullgraph(scale, caplog):
    f = torch.compile(lambda x: scale(x), backend=lowered, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        *first, (name, _) = many(scale, 3)
        for each, value in first:
            with ir.priority({scale.name: [each]}):
                assert f(torch.ones(2))[0] == value
        with ir.priority({scale.name: [name]}), pytest.raises(Exception, match="fullgraph=True"):
            f(torch.ones(2))
    assert "kernel priorities differ from those this was compiled for" in caplog.text
