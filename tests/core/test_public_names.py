"""The names that `import irframework as ir` gives."""

import importlib
import inspect
import pkgutil

import pytest

import irframework as ir
from irframework import errors

from .distributions import answer, run_python

DESIGN = [
    "register_op",
    "ops",
    "reject",
    "supports",
    "explain",
    "priority",
    "IrOpPriorityConfig",
    "KernelConfig",
    "add_cli_args",
    "configure",
    "hookimpl",
    "plugins",
    "load_plugins",
    "install",
    "last_report",
    "errors",
    "Platform",
    "current_platform",
    "IrOp",
    "IrOpImpl",
    "Decision",
    "Candidate",
    "Rejected",
    "Tolerance",
    "PluginInfo",
    "compiler",
]


@pytest.mark.parametrize("name", sorted({*DESIGN, *ir.__all__}))
def test_public_name_exists_and_is_listed(name):
    assert getattr(ir, name) is not None
    assert name in ir.__all__
    assert name in dir(ir)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = ir.nothing_of_the_kind


def test_submodules_do_not_hide_public_functions():
    for name in ("irframework.priority", "irframework.plugins"):
        importlib.import_module(name)
    assert callable(ir.plugins)
    assert inspect.isclass(ir.priority)


def test_any_order_of_first_uses_works():
    code = """
        import json
        import irframework.priority, irframework.plugins
        import irframework as ir
        from irframework import priority, plugins, explain
        from irframework import *
        print(json.dumps([callable(plugins), isinstance(priority, type), callable(ir.supports)]))
    """
    assert answer(run_python(code)) == [True, True, True]


def test_every_error_is_an_ir_error_with_a_docstring():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert len(classes) > 20
    for cls in classes:
        assert issubclass(cls, errors.IrError)
        assert cls.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UnknownOpError", AttributeError),
        ("UnknownProviderError", ValueError),
        ("SignatureError", ValueError),
        ("ArgumentError", TypeError),
        ("DeviceMismatchError", RuntimeError),
        ("MissingDependencyError", ImportError),
    ],
)
def test_error_is_also_what_a_python_user_expects(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_every_core_module_says_what_it_owns_and_fits_on_its_pages():
    for module in pkgutil.iter_modules(ir.__path__):
        if not module.ispkg and not module.name.startswith("_"):
            source = inspect.getsource(importlib.import_module(f"irframework.{module.name}"))
            assert "own" in source.split('"""')[1].lower(), module.name
            assert source.count("\n") <= 400, module.name


def test_logging_level_of_the_environment_is_the_loggers():
    code = """
        import json, logging, torch, irframework as ir
        ir.ops.rms_norm(torch.ones(1, 4), None, 1e-6)
        logger = logging.getLogger("irframework")
        logger.debug("said at debug level")
        print(json.dumps([logger.level, logging.getLogger().level, len(logging.getLogger().handlers)]))
    """
    done = run_python(code, IRFRAMEWORK_LOGGING_LEVEL="debug")
    assert answer(done) == [10, 30, 0]
    assert "said at debug level" in done.stderr
    quiet = run_python(code)
    assert answer(quiet) == [0, 30, 0]
    assert "said at debug level" not in quiet.stderr
