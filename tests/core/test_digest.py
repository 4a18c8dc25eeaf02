"""Digests of implementations, for cache keys."""

import functools
import textwrap

import pytest
import torch

from irframework.digest import digest_function

from .distributions import run_fresh_python


def made(text, **names):
    scope = {"torch": torch, "__name__": "made_up", **names}
    exec(textwrap.dedent(text), scope)
    return scope["f"]


CHANGES = {
    "constant": ("def f(x): return x + 1", "def f(x): return x + 2"),
    "operator": ("def f(x): return x + 1", "def f(x): return x - 1"),
    "attribute": ("def f(x): return x.sin()", "def f(x): return x.cos()"),
    "default": ("def f(x, y=1): return x", "def f(x, y=2): return x"),
    "keyword default": ("def f(x, *, y=1): return x", "def f(x, *, y=2): return x"),
    "inner function": (
        "def f(x):\n    def g(): return 1\n    return g",
        "def f(x):\n    def g(): return 2\n    return g",
    ),
    "function it calls": ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
    "function called inside a comprehension": (
        "def g(x): return x\ndef f(x): return [g(i) for i in x]",
        "def g(x): return -x\ndef f(x): return [g(i) for i in x]",
    ),
    "global number": ("N = 1\ndef f(x): return x + N", "N = 2\ndef f(x): return x + N"),
    "global dtype": ("D = torch.float16\ndef f(x): return x.to(D)", "D = torch.bfloat16\ndef f(x): return x.to(D)"),
    "global tuple": ("D = (1, 2)\ndef f(x): return x in D", "D = (1, 3)\ndef f(x): return x in D"),
    "global dict": ("D = {'a': 1}\ndef f(x): return D[x]", "D = {'a': 2}\ndef f(x): return D[x]"),
    "global set": ("D = {1, 2}\ndef f(x): return x in D", "D = {1, 3}\ndef f(x): return x in D"),
    "global class": (
        "class C:\n    def m(self): return 1\ndef f(x): return C().m()",
        "class C:\n    def m(self): return 2\ndef f(x): return C().m()",
    ),
    "method of a global object": (
        "class C:\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C:\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_changes_with(what):
    first, second = (made(text) for text in CHANGES[what])
    assert digest_function(first) != digest_function(second)


@pytest.mark.parametrize("what", CHANGES)
def test_equal_source_has_an_equal_digest(what):
    text = CHANGES[what][0]
    assert digest_function(made(text)) == digest_function(made(text))


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), ("a", "b"), (torch.float16, torch.bfloat16), ((1,), (2,)), ({"a": 1}, {"a": 2}), (torch.add, torch.mul),
     (torch.nn.functional.silu, torch.nn.functional.gelu), (torch.float32, None), ({1}, {2}),
     (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)],
)  # fmt: skip
def test_digest_changes_with_a_closure_and_a_partial(first, second):
    def closing(value):
        def f(x):
            return value

        return f

    def f(value, x):
        return value

    assert digest_function(closing(first)) != digest_function(closing(second))
    assert digest_function(functools.partial(f, first)) != digest_function(functools.partial(f, second))


def test_digest_of_a_callable_object_changes_with_its_state():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

    assert digest_function(Scale(1)) != digest_function(Scale(2))
    assert digest_function(Scale(1)) == digest_function(Scale(1))


def test_what_a_plugin_remembers_does_not_change_its_digest():
    text = "MEMO = {}\nSIZE = 1\ndef f(x): return MEMO.setdefault(x, SIZE)"
    scope = {"__name__": "made_up"}
    exec(text, scope)
    before = digest_function(scope["f"], packaged=True)
    scope["f"](1)
    assert digest_function(scope["f"], packaged=True) == before
    scope["SIZE"] = 2
    assert digest_function(scope["f"], packaged=True) != before


def test_recursive_functions_have_a_digest():
    text = "def f(x): return g(x)\ndef g(x): return f(x)"
    assert digest_function(made(text)) == digest_function(made(text))


def test_builtin_functions_have_a_digest():
    assert digest_function(torch.add) != digest_function(torch.mul)


def test_impl_digest_changes_with_what_is_declared(declare):
    import irframework as ir

    def fn(x, weight=None, epsilon=1e-6):
        return x

    options = [
        {},
        {"device_types": ("cpu",)},
        {"batch_invariant": True},
        {"inplace": True},
        {"supports_args": ir.supports(ndim=2)},
        {"supports_args": ir.supports(ndim=3)},
        {"supports_args": lambda x, weight=None, epsilon=1e-6: True},
        {"supports_args": lambda x, weight=None, epsilon=1e-6: False},
    ]
    found = [declare(allow_inplace=True).register_impl("p", **option)(fn).digest() for option in options]
    assert len(set(found)) == len(found)


def test_digests_are_equal_in_every_process():
    code = """
        import json, torch, irframework as ir
        from irframework.digest import digest_function
        NAMES = frozenset({"a", "b", "c", "d", "e"})
        def f(x):
            return x in {"p", "q", "r", "s"} or x in NAMES
        from irframework.registry import all_ops
        print(digest_function(f), *(i.digest() for o in all_ops().values() for i in o.impls.values()))
    """
    first, second = (run_fresh_python(code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert first
    assert first == second
