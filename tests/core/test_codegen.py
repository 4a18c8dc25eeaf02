"""The text of generated dispatchers."""

import inspect
import linecache
import threading
import traceback

import pytest
import torch

import irframework as ir


def text_of(op):
    """The dispatcher in place after some calls."""
    for _ in range(3):
        op(torch.ones(1))
    code = type(op).__call__.__code__
    return "".join(linecache.getlines(code.co_filename))


def constant(value):
    def fn(x, weight=None, epsilon=1e-6):
        return torch.full_like(x, value)

    return fn


def test_dispatcher_has_the_ops_exact_signature(declare):
    op = declare()
    text_of(op)
    assert list(inspect.signature(type(op).__call__).parameters) == ["self", "x", "weight", "epsilon"]


def test_dispatcher_does_not_grow_with_providers_that_can_never_be_asked(declare):
    few, many = declare(), declare()
    few.register_impl("a")(constant(1))
    many.register_impl("a")(constant(1))
    for number in range(20):
        many.register_impl(f"z{number}")(constant(2))
        many.register_impl(f"gpu{number}", device_types=("cuda",))(constant(3))
        many.register_impl(f"off{number}", supported=False)(constant(4))
    assert text_of(few).count("\n") == text_of(many).count("\n")


def test_dispatcher_of_a_plain_call_has_no_star_arguments_and_no_dictionary(declare):
    op = declare()
    op.register_impl("a", supports_args=ir.supports(dtype=torch.float32))(constant(1))
    text = text_of(op)
    assert "*" not in text
    assert "{" not in text


def test_text_is_shown_in_tracebacks(declare):
    op = declare()

    @op.register_impl("a")
    def sometimes(x, weight=None, epsilon=1e-6):
        if x.numel() > 1:
            raise RuntimeError("too long")
        return x + 1

    text_of(op)
    with pytest.raises(RuntimeError, match="too long") as raised:
        op(torch.ones(2))
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert any("_result = " in (line or "") for line in lines)


def test_dispatchers_of_many_contexts_are_bounded(declare):
    op = declare()
    for number in range(150):
        op.register_impl(f"p{number}")(constant(float(number)))
    for number in range(150):
        with ir.priority({op.name: f"p{number}"}):
            assert op(torch.ones(1)).item() == number
            assert op(torch.ones(1)).item() == number
    assert len(op.generated) <= 64


def test_registrations_and_calls_of_many_threads_do_not_disturb_each_other(declare):
    op = declare()
    op.register_impl("a")(constant(1.0))
    problems, stop = [], threading.Event()

    def call(provider, value):
        try:
            with ir.priority({op.name: provider}):
                while not stop.is_set():
                    if op(torch.ones(1)).item() != value:
                        problems.append((provider, "wrong value"))
        except Exception as error:
            problems.append((provider, error))

    threads = [threading.Thread(target=call, args=pair) for pair in (("a", 1.0), ("native", 2.0), ("a,native", 1.0))]
    for thread in threads:
        thread.start()
    for number in range(30):
        op.register_impl(f"z{number}")(constant(3.0))
        if number % 2:
            op.unregister_impl(f"z{number}")
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
