"""Digests of implementations, for cache keys."""

import enum
import functools
import operator
import pathlib
import textwrap
import types

import numpy
import pytest
import torch

import irframework as ir
from irframework.digest import digest_function

from .distributions import answer, run_fresh_python, run_python, write_distribution


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
    "static method of a global class": (
        "class C:\n    @staticmethod\n    def m(): return 1\ndef f(x): return C.m()",
        "class C:\n    @staticmethod\n    def m(): return 2\ndef f(x): return C.m()",
    ),
    "property of a global object": (
        "class C:\n    @property\n    def m(self): return 1\nc = C()\ndef f(x): return c.m",
        "class C:\n    @property\n    def m(self): return 2\nc = C()\ndef f(x): return c.m",
    ),
    "base of a global class": (
        "class B:\n    def m(self): return 1\nclass C(B): pass\ndef f(x): return C().m()",
        "class B:\n    def m(self): return 2\nclass C(B): pass\ndef f(x): return C().m()",
    ),
    "cached function it calls": (
        "import functools\n@functools.cache\ndef g(x): return x\ndef f(x): return g(x)",
        "import functools\n@functools.cache\ndef g(x): return -x\ndef f(x): return g(x)",
    ),
    "function behind a decorator": (
        "def f(x): return x + 1\nf = torch.no_grad()(f)",
        "def f(x): return x + 2\nf = torch.no_grad()(f)",
    ),
    "function that claims to be torch's": (
        "import functools\n@functools.wraps(torch.nn.functional.silu)\ndef g(x): return 1\ndef f(x): return g(x)",
        "import functools\n@functools.wraps(torch.nn.functional.silu)\ndef g(x): return 2\ndef f(x): return g(x)",
    ),
    "torch function under one name": (
        "from torch.nn.functional import silu as act\ndef f(x): return act(x)",
        "from torch.nn.functional import gelu as act\ndef f(x): return act(x)",
    ),
    "order of a global dict": (
        "D = {'a': abs, 'b': len}\ndef f(x): return [g(x) for g in D.values()]",
        "D = {'b': len, 'a': abs}\ndef f(x): return [g(x) for g in D.values()]",
    ),
    "which of two equal parts comes again": (
        "a, b = [1], [2]\nD = (a, b, a)\ndef f(x): return D",
        "a, b = [1], [2]\nD = (a, b, b)\ndef f(x): return D",
    ),
    "extent of a try block": (
        "def f(x):\n    try:\n        g()\n        h()\n    except E:\n        pass",
        "def f(x):\n    g()\n    try:\n        h()\n    except E:\n        pass",
    ),
    "kind of a parameter": ("def f(x, y): return y", "def f(x, *, y): return y"),
    "function it calls behind a decorator of torch": (
        "D = torch.no_grad()\ng = D(lambda x: x + 1)\ndef f(x): return g(x)",
        "D = torch.no_grad()\ng = D(lambda x: x + 2)\ndef f(x): return g(x)",
    ),
    "function it calls behind torch.compiler.disable": (
        "g = torch.compiler.disable(lambda x: x + 1)\ndef f(x): return g(x)",
        "g = torch.compiler.disable(lambda x: x + 2)\ndef f(x): return g(x)",
    ),
    "function it calls behind torch.vmap": (
        "g = torch.vmap(lambda x: x + 1)\ndef f(x): return g(x)",
        "g = torch.vmap(lambda x: x + 2)\ndef f(x): return g(x)",
    ),
    "state of a decorator of torch": (
        "D = torch.autocast('cpu', enabled=1 == 1)\ng = D(lambda x: x)\ndef f(x): return g(x)",
        "D = torch.autocast('cpu', enabled=2 == 1)\ng = D(lambda x: x)\ndef f(x): return g(x)",
    ),
    "context manager it enters": (
        "import contextlib\n@contextlib.contextmanager\ndef g(): yield 1\ndef f(x):\n    with g() as n: return n",
        "import contextlib\n@contextlib.contextmanager\ndef g(): yield 2\ndef f(x):\n    with g() as n: return n",
    ),
    "function chosen by the type of its argument": (
        "import functools\ng = functools.singledispatch(abs)\ng.register(int, lambda x: 1)\ndef f(x): return g(x)",
        "import functools\ng = functools.singledispatch(abs)\ng.register(int, lambda x: 2)\ndef f(x): return g(x)",
    ),
    "attribute of the function": ("def f(x): return f.n\nf.n = 1", "def f(x): return f.n\nf.n = 2"),
    "attribute of a function it calls": (
        "def g(x): return g.n\ng.n = 1\ndef f(x): return g(x)",
        "def g(x): return g.n\ng.n = 2\ndef f(x): return g(x)",
    ),
    "read-only mapping": (
        "import types\nD = types.MappingProxyType({'a': 1})\ndef f(x): return D['a']",
        "import types\nD = types.MappingProxyType({'a': 2})\ndef f(x): return D['a']",
    ),
    "default of a mapping": (
        "import collections\nD = collections.defaultdict(lambda: 1)\ndef f(x): return D[x]",
        "import collections\nD = collections.defaultdict(lambda: 2)\ndef f(x): return D[x]",
    ),
    "limits of a dtype": (
        "D = torch.finfo((torch.float16, torch.float32)[1 - 1])\ndef f(x): return x.clamp(max=D.max)",
        "D = torch.finfo((torch.float16, torch.float32)[2 - 1])\ndef f(x): return x.clamp(max=D.max)",
    ),
    "overload of an operator": (
        "g = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)[1 - 1]\ndef f(x): return g(x, 1)",
        "g = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)[2 - 1]\ndef f(x): return g(x, 1)",
    ),
    "method of a subclass of int": (
        "class C(int):\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C(int):\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
    "method of a subclass of tuple": (
        "class C(tuple):\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C(tuple):\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
    "method of a subclass of list": (
        "class C(list):\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C(list):\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
    "method of a subclass of dict": (
        "class C(dict):\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C(dict):\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
    "content of a subclass of deque": (
        "import collections\nclass C(collections.deque): pass\nc = C([1])\ndef f(x): return c[0]",
        "import collections\nclass C(collections.deque): pass\nc = C([2])\ndef f(x): return c[0]",
    ),
    "method of a metaclass": (
        "class M(type):\n    def m(cls): return 1\nclass C(metaclass=M): pass\ndef f(x): return C.m()",
        "class M(type):\n    def m(cls): return 2\nclass C(metaclass=M): pass\ndef f(x): return C.m()",
    ),
    "attribute of a tensor": (
        "t = torch.ones(1)\nt.scale = 1\ndef f(x): return x * t.scale",
        "t = torch.ones(1)\nt.scale = 2\ndef f(x): return x * t.scale",
    ),
    "strides of a tensor": (
        "t = torch.ones(2, 2).as_strided((2, 2), ((2, 1), (1, 2))[1 - 1])\ndef f(x): return t.stride()",
        "t = torch.ones(2, 2).as_strided((2, 2), ((2, 1), (1, 2))[2 - 1])\ndef f(x): return t.stride()",
    ),
    "what a weak reference leads to": (
        "import weakref\nclass C: pass\nc = C()\nc.n = 1\nr = weakref.ref(c)\ndef f(x): return r().n",
        "import weakref\nclass C: pass\nc = C()\nc.n = 2\nr = weakref.ref(c)\ndef f(x): return r().n",
    ),
    "function found by its name": (
        "def g(x): return 1\ndef f(x): return globals()['g'](x)",
        "def g(x): return 2\ndef f(x): return globals()['g'](x)",
    ),
    "method of a global object": (
        "class C:\n    def m(self): return 1\nc = C()\ndef f(x): return c.m()",
        "class C:\n    def m(self): return 2\nc = C()\ndef f(x): return c.m()",
    ),
}


MODULE = """
import types
m = types.ModuleType("mine")
exec("def g(x): return {number}", vars(m))
"""
REACHED = {
    "in a mapping": "D = {'a': m}\ndef f(x): return D['a'].g(x)",
    "as an attribute": "class C: pass\nc = C()\nc.m = m\ndef f(x): return c.m.g(x)",
    "as a default": "def h(x, m=m): return m.g(x)\ndef f(x): return h(x)",
    "as an argument": "def h(m, x): return m.g(x)\ndef f(x): return h(m, x)",
    "by the name of its function": "def f(x): return getattr(m, 'g')(x)",
}


@pytest.mark.parametrize("how", REACHED)
def test_digest_changes_with_the_functions_of_a_module_reached(how):
    first, again, second = (digest_function(made(MODULE.format(number=n) + REACHED[how])) for n in (1, 1, 2))
    assert first == again != second


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
     (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor), (range(3), range(4)), (1, 1.0), (1, True),
     (pathlib.Path("a"), pathlib.Path("b")),
     (numpy.arange(3), numpy.arange(1, 4)), (numpy.float32(1), numpy.float32(2)),
     (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)), (operator.itemgetter(0), operator.itemgetter(1)),
     (torch.zeros(3), torch.ones(3)), (torch.zeros(1 << 17), torch.ones(1 << 17)), (torch.zeros(2), torch.zeros(2, 1)),
     (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), (enum.Enum("E", "A B").A, enum.Enum("E", "A B").B)],
)  # fmt: skip
def test_digest_changes_with_a_closure_and_a_partial(first, second):
    def closing(value):
        def f(x):
            return value

        return f

    def f(value, x):
        return value

    assert digest_function(closing(first)) == digest_function(closing(first))
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


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def test_digest_of_a_callable_object_with_slots_changes_with_its_state():
    assert digest_function(Slotted(1)) != digest_function(Slotted(2))
    assert digest_function(Slotted(1)) == digest_function(Slotted(1))


def test_two_methods_of_one_object_differ_and_a_method_has_a_stable_digest():
    class Both:
        def one(self, x):
            return x + 1

        def two(self, x):
            return x + 2

    both = Both()
    assert digest_function(both.one) != digest_function(both.two)
    assert digest_function(both.one) == digest_function(both.one)


def test_a_cell_of_a_notebook_that_is_run_again_keeps_its_digest_and_a_changed_one_has_another():
    def cell(text, number):
        scope = {"torch": torch, "__name__": "__main__"}
        exec(compile(text, f"<ipython-input-{number}-abc>", "exec"), scope)
        return digest_function(scope["f"])

    assert cell("def f(x): return x + 1", 1) == cell("\n\ndef f(x): return x + 1", 2)
    assert cell("def f(x): return x + 1", 1) != cell("def f(x): return x + 2", 1)


def test_what_cannot_be_looked_into_has_a_digest_of_this_process_only():
    code = """
        import torch
        from irframework.digest import digest_function
        class Strange(torch.Tensor):
            pass
        value = torch.ones(2).as_subclass(Strange)
        f = lambda x: x + value
        assert digest_function(f) == digest_function(f)
        print(digest_function(f))
    """
    assert run_python(code).stdout != run_python(code).stdout


def shorter(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "change", ["schema", "backward", "shape function", "fuse", "allow_inplace", "activations"]
)  # fmt: skip
def test_digest_of_an_op_changes_with(declare, change):
    from irframework.digest import digest_of_op

    first, second = declare(), declare()
    if change == "schema":
        second = declare(shorter)
    elif change == "backward":
        second.register_backward(lambda grads, x, weight, epsilon: (grads[0], None))
    elif change == "shape function":
        second.register_fake(lambda x, weight=None, epsilon=1e-6: x)
    elif change == "fuse":
        first, second = declare(fuse=ir.supports(dtype=torch.float32)), declare(fuse=ir.supports(dtype=torch.float64))
    elif change == "allow_inplace":
        second = declare(allow_inplace=True)
    else:
        first, second = declare(allow_inplace=True), declare(allow_inplace=True, activations=["weight"])
    assert digest_of_op(first) != digest_of_op(second)
    assert digest_of_op(first) == digest_of_op(first)


# --- what lies in files -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys, irframework as ir
from irframework.digest import digest_function
sys.path.insert(0, {place!r})
{text}
print(digest_function(f))
"""
USES = {
    "an import": "import helper\ndef f(x): return helper.g(x)",
    "a name": "from helper import g\ndef f(x): return g(x)",
    "a module in a package": "import pack.helper\ndef f(x): return pack.helper.g(x)",
    "a module held by a closure": "def make():\n    import helper\n    return lambda x: helper.g(x)\nf = make()",
    "an import inside": "def f(x):\n    import helper\n    return helper.g(x)",
    "a name imported inside": "def f(x):\n    from helper import g\n    return g(x)",
    "an import inside of a module in a package": "def f(x):\n    from pack.helper import g\n    return g(x)",
    "an import inside of what imports it": "def f(x):\n    import outer\n    return outer.g(x)",
    "what it calls calls": "import outer\ndef f(x): return outer.g(x)",
    "a module called like one of Python's": "import test\ndef f(x): return test.g(x)",
}


def digest_of_script(folder, text, value):
    (folder / "pack").mkdir(exist_ok=True)
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "outer.py").write_text("import helper\ndef g(x): return helper.g(x)\n")
    for name in ("helper.py", "pack/helper.py", "test.py"):
        (folder / name).write_text(f"def g(x): return x + {value}\n")
    done = run_python(SCRIPT.format(place=str(folder), text=text), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("use", USES)
def test_digest_changes_with_a_helper_module_reached_through(tmp_path, use):
    first, second = (digest_of_script(tmp_path, USES[use], value) for value in (1, 2))
    assert first != second


def test_the_digest_of_code_in_files_is_the_same_in_a_second_process(tmp_path):
    text = "import helper, outer, test\ndef f(x):\n    import pack.helper\n    return helper.g(outer.g(test.g(x)))"
    assert digest_of_script(tmp_path, text, 1) == digest_of_script(tmp_path, text, 1)


PLUGIN = """
@ir.hookimpl
def irframework_register_impls():
    from {package}.kernels import kernel
    ir.ops.rms_norm.register_impl("plug")(kernel)
"""
KERNELS = """
import functools
from .direct import direct
from . import attribute
{cached}
def kernel(x, weight, epsilon, variance_size=None):
    from .inside import inside
    return direct(x) + attribute.value(x) + inside(x)
"""
OWN_DIGEST = """
    import json, irframework as ir
    print(json.dumps(ir.ops.rms_norm.impls["plug"].digest()))
"""


def write_plugin(root, version="1.0", **files):
    write_distribution(root, "plug", PLUGIN.format(package="plug_kernels"), version=version)
    package = root / "plug_kernels"
    package.mkdir()
    contents = {
        "__init__.py": "",
        "kernels.py": KERNELS.format(cached=""),
        "direct.py": "from .deep import deep\ndef direct(x): return deep(x)\n",
        "deep.py": "def deep(x): return x\n",
        "attribute.py": "def value(x): return x\n",
        "inside.py": "def inside(x): return x\n",
        "_C.abi3.so": "binary",
        **files,
    }
    for name, content in contents.items():
        (package / name).write_text(content)
    (root / f"plug-{version}.dist-info" / "RECORD").write_text("plug.py,,\n_plug_C.so,,\nREADME.txt,,\n")
    (root / "_plug_C.so").write_text(files.get("_plug_C.so", "binary"))


@pytest.fixture(scope="module")
def plugin_digest(tmp_path_factory):
    root = tmp_path_factory.mktemp("plugin")
    write_plugin(root)
    return answer(run_python(OWN_DIGEST, root))


@pytest.mark.parametrize(
    "changed",
    [
        {"kernels.py": KERNELS.format(cached="SIZE = 2")},
        {"deep.py": "def deep(x): return -x\n"},
        {"attribute.py": "def value(x): return -x\n"},
        {"inside.py": "def inside(x): return -x\n"},
        {"_C.abi3.so": "another binary"},
        {"_plug_C.so": "another binary"},
        {"tuned.cubin": "binary"},
        {"version": "1.1"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_digest_of_a_plugins_implementation_changes_with(tmp_path, plugin_digest, changed):
    write_plugin(tmp_path, **changed)
    assert answer(run_python(OWN_DIGEST, tmp_path)) != plugin_digest


def test_digest_of_a_plugins_implementation_is_the_same_in_another_process_and_place(tmp_path, plugin_digest):
    write_plugin(tmp_path)
    assert answer(run_python(OWN_DIGEST, tmp_path)) == plugin_digest


def test_a_partial_of_a_plugin_is_digested_with_the_plugins_files(tmp_path):
    body = """
        import functools
        @ir.hookimpl
        def irframework_register_impls():
            def kernel(scale, x, weight, epsilon, variance_size=None):
                import plug_helper
                return plug_helper.scaled(x, scale)
            ir.ops.rms_norm.register_impl("plug")(functools.partial(kernel, 2))
    """
    found = []
    for value in (1, 2):
        root = tmp_path / str(value)
        root.mkdir()
        write_distribution(root, "plug", body)
        (root / "plug_helper.py").write_text(f"def scaled(x, scale): return x * {value}\n")
        found.append(answer(run_python(OWN_DIGEST, root)))
    assert found[0] != found[1]


def test_an_extension_that_lies_outside_of_the_package_is_digested_once_it_is_loaded(tmp_path):
    body = """
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("plug.part", __file__.replace("plug.py", "far/part.py"))
        sys.modules["plug.part"] = importlib.util.module_from_spec(spec)
        @ir.hookimpl
        def irframework_register_impls():
            @ir.ops.rms_norm.register_impl("plug")
            def kernel(x, weight, epsilon, variance_size=None):
                return x
    """
    write_distribution(tmp_path, "plug", body)
    (tmp_path / "far").mkdir()
    found = []
    for text in ("1", "2"):
        (tmp_path / "far" / "part.py").write_text(text)
        found.append(answer(run_python(OWN_DIGEST, tmp_path)))
    assert found[0] != found[1]


def test_a_file_that_changes_while_the_process_runs_gives_a_digest_of_that_process_only(tmp_path):
    write_plugin(tmp_path)
    code = """
        import json, os, pathlib, time, irframework as ir
        time.sleep(0.05)
        path = pathlib.Path(os.environ["FILE"])
        path.write_text(path.read_text())
        print(json.dumps(ir.ops.rms_norm.impls["plug"].digest()))
    """
    file = str(tmp_path / "plug_kernels" / "deep.py")
    first, second = (answer(run_python(code, tmp_path, FILE=file)) for _ in range(2))
    assert first != second
    assert answer(run_python(OWN_DIGEST, tmp_path)) not in (first, second)
