"""`irframework migrate`: the printed code runs, and computes what the class computed."""

import ast
import copy
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import platform
from irframework.cli import main
from irframework.errors import ArgumentError
from irframework.layers import custom_op
from irframework.registry import Transaction, registry

pytest.importorskip("libcst")

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from vllm.model_executor.custom_op import CustomOp
"""

NORM = '''
from typing import Optional, Union

@CustomOp.register("mg_norm")
class MgNorm(CustomOp):
    """A norm."""

    def __init__(self, size: int, eps: float = 1e-6, part: Optional[int] = None, weighted: bool = True) -> None:
        super().__init__()
        self.size = size
        self.variance_epsilon = eps
        self.part = None if part == size else part
        self.weight = torch.ones(size)
        if weighted:
            self.weight = nn.Parameter(self.weight)

    def forward_native(
        self, x: torch.Tensor, residual: Optional[torch.Tensor] = None
    ) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The meaning."""
        dtype = x.dtype
        x = x.float()
        if residual is not None:
            x = x + residual.float()
            residual = x.to(dtype)
        assert x.shape[-1] == self.size, "rows of another size"
        h = x if self.part is None else x[..., : self.part]
        x = self._scaled(x, h).to(dtype) * self.weight
        if residual is None:
            return x
        else:
            return x, residual

    def _scaled(self, x, h):
        return x * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward_cpu(self, x, residual=None):
        if self.part is not None:
            return self.forward_native(x, residual)
        assert x.dtype in (torch.float32, torch.float64), "full precision only"
        if residual is not None:
            x.add_(residual)
            residual.copy_(x)
            x.copy_(torch.rms_norm(x, (self.size,), self.weight, self.variance_epsilon))
            return x, residual
        return torch.rms_norm(x, (self.size,), self.weight, self.variance_epsilon)

    def forward_hip(self, x, residual=None):
        return self.forward_cuda(x, residual)

    def forward_cuda(self, x, residual=None):
        raise RuntimeError("no GPU here")
'''

GATED = """
FACTOR = 2.0

def _twice(x):
    return x * FACTOR

@CustomOp.register("mg_gated")
class MgGated(CustomOp):
    def __init__(self):
        super().__init__()
        self.kernel = torch.mul

    @staticmethod
    def halves(x: torch.Tensor):
        return x.chunk(2, dim=-1)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.halves(x)
        return _twice(F.silu(gate) * up)

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cpu
        assert x.is_contiguous(), "needs contiguous rows"
        gate, up = self.halves(x)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        self.kernel(F.silu(gate) * FACTOR, up, out=out)
        return out
"""


@pytest.fixture
def transaction(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transaction]:
    """What a test registers goes with it. Layers run their CPU's method, also where there is a GPU."""
    monkeypatch.setattr(custom_op, "_warned", True)
    monkeypatch.setattr(platform, "_choose", platform.CpuPlatform)
    registry.changed()
    made = Transaction("test_migrate")
    yield made
    made.roll_back()
    registry.changed()


@pytest.fixture
def migrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transaction: Transaction
) -> Callable[..., tuple[dict[str, Any], dict[str, Any], str]]:
    """Migrate a file: the namespace of the file, that of the printed code, and what was printed."""

    def run(body: str, *options: str, code: int = 0) -> tuple[dict[str, Any], dict[str, Any], str]:
        text = HEAD + textwrap.dedent(body)
        file = tmp_path / "layers.py"
        file.write_text(text)
        assert main(["migrate", str(file), *options]) == code
        printed = capsys.readouterr().out
        ast.parse(printed)
        old: dict[str, Any] = {"__name__": "old_layers"}
        exec(text.replace("vllm.model_executor.custom_op", "irframework.compat"), old)
        registry.layers.clear()
        registry.replacements.clear()
        new: dict[str, Any] = {"__name__": "new_layers"}
        with registry.registering(transaction):
            exec(compile(printed, "printed.py", "exec"), new)
        return old, new, printed

    layers, replacements = dict(registry.layers), dict(registry.replacements)
    yield run
    registry.layers.clear()
    registry.layers.update(layers)
    registry.replacements.clear()
    registry.replacements.update(replacements)


def cloned(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def assert_same(old: Any, new: Any, *arguments: Any) -> None:
    """The two layers, with the same weights, give the same, and the new one leaves its arguments alone."""
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    given = cloned(arguments)
    torch.testing.assert_close(new(*given), old(*cloned(arguments)))
    for mine, original in zip(given, arguments, strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=0)


@pytest.mark.usefixtures("seeded")
def test_a_norm_with_an_optional_residual_becomes_two_ops_that_compute_the_same(migrated):
    old, new, printed = migrated(NORM)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    for options in ({}, {"part": 4}, {"weighted": False}):
        old_layer, new_layer = old["MgNorm"](8, **options), new["MgNorm"](8, **options)
        assert_same(old_layer, new_layer, x)
        assert_same(old_layer, new_layer, x, residual)
    assert "op mg_norm and mg_norm_with_residual" in printed


@pytest.mark.usefixtures("seeded")
def test_guards_become_predicates_with_reasons(migrated):
    _, new, _ = migrated(NORM)
    layer, part = new["MgNorm"](8), new["MgNorm"](8, part=4)
    x = torch.randn(3, 8)
    assert layer.explain(x).provider == "custom_cpu"
    for other, call, reason in (
        (part, x, "not for part is not None"),
        (layer, x.bfloat16(), "full precision only"),
    ):
        decision = other.explain(call)
        assert decision.provider == "native"
        assert reason in {candidate.reason for candidate in decision.candidates}


def test_an_implementation_that_returns_its_arguments_is_in_place(migrated):
    _, new, _ = migrated(NORM)
    op = new["mg_norm_with_residual"]
    assert (op.activations, op.allow_inplace) == (("x", "residual"), True)
    assert op.impls["custom_cpu"].inplace
    assert not new["mg_norm"].impls["custom_cpu"].inplace


def test_asserts_of_the_meaning_become_errors(migrated):
    _, new, _ = migrated(NORM)
    with pytest.raises(ArgumentError, match="rows of another size"):
        new["MgNorm"](8)(torch.ones(2, 6))


def test_a_method_that_only_calls_another_one_gives_that_one_its_devices(migrated):
    _, new, printed = migrated(NORM)
    assert set(new["mg_norm"].impls) == {"native", "custom_cpu", "custom_cuda"}
    assert new["mg_norm"].impls["custom_cuda"].device_types == ("cuda",)
    assert "version.hip" not in printed


@pytest.mark.usefixtures("seeded")
def test_static_methods_functions_constants_and_kernels_are_taken_along(migrated):
    old, new, printed = migrated(GATED)
    x = torch.randn(4, 16)
    assert_same(old["MgGated"](), new["MgGated"](), x)
    assert new["MgGated"]().explain(x).provider == "custom_cpu"
    assert new["MgGated"]().explain(x.t().contiguous().t()).provider == "native"
    assert "torch.mul(" in printed
    assert "is_cpu" not in printed  # the framework checks devices


@pytest.mark.usefixtures("seeded")
def test_the_printed_class_compiles_whole(migrated):
    _, new, _ = migrated(GATED)
    torch._dynamo.reset()
    layer, x = new["MgGated"](), torch.randn(4, 16)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.usefixtures("seeded")
def test_a_replacement_in_the_same_file_becomes_implementations_of_its_originals_op(migrated):
    vendor = """
    @CustomOp.register_oot(name="MgGated")
    class AcmeGated(MgGated):
        def forward_cpu(self, x):
            if x.dtype != torch.float32:
                return self.forward_native(x)
            return self.forward_native(x) + 1
    """
    _, new, printed = migrated(GATED + textwrap.dedent(vendor))
    op, x = new["mg_gated"], torch.randn(4, 16)
    assert set(op.impls) == {"native", "custom_cpu", "acme_gated_cpu"}
    with ir.priority({"mg_gated": "acme_gated_cpu"}):
        torch.testing.assert_close(op(x), op.native(x) + 1)
        assert op.explain(x.double()).provider != "acme_gated_cpu"
    assert "# --- AcmeGated, line" in printed


@pytest.mark.usefixtures("seeded")
def test_a_result_that_is_none_with_its_argument_is_declared_so(migrated):
    old, new, printed = migrated("""
    @CustomOp.register("mg_rotary")
    class MgRotary(CustomOp):
        def __init__(self, size: int, cache: torch.Tensor):
            super().__init__()
            self.size = size
            self.register_buffer("cache", cache)

        def forward_native(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            factor = self.cache.index_select(0, positions)[:, : self.size]
            query = query * factor
            if key is not None:
                key = key * factor
            return query, key

        def forward_cpu(self, positions, query, key=None):
            factor = self.cache[positions, : self.size]
            query.mul_(factor)
            if key is not None:
                key.mul_(factor)
            return query, key
    """)
    assert 'activations=("query", "key"), allow_inplace=True, optional_outputs={1: "key"}' in printed
    cache, positions = torch.randn(9, 4), torch.tensor([1, 7])
    layers = old["MgRotary"](4, cache), new["MgRotary"](4, cache)
    query, key = torch.randn(2, 4), torch.randn(2, 4)
    assert_same(*layers, positions, query, key)
    assert_same(*layers, positions, query)
    assert layers[1].explain(positions, query, key).provider == "custom_cpu"


@pytest.mark.usefixtures("seeded")
def test_a_static_meaning_an_attribute_that_is_none_and_keyword_arguments_work(migrated):
    old, new, _ = migrated("""
    class MgStatic(CustomOp):
        @staticmethod
        def forward_native(x: torch.Tensor) -> torch.Tensor:
            return x * 3

    class MgNothing(CustomOp):
        def __init__(self, scale: float = 2.0):
            super().__init__()
            self.bias = None
            self._scale = scale ** -0.5

        def forward_native(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
            if self.bias is not None:
                x = x + self.bias
            return x * self._scale * (2 if twice else 1)
    """)
    x = torch.randn(3)
    assert_same(old["MgStatic"](), new["MgStatic"](), x)
    assert_same(old["MgNothing"](), new["MgNothing"](), x)
    torch.testing.assert_close(new["MgNothing"]()(x, twice=True), old["MgNothing"]()(x, twice=True))


def test_the_providers_name_can_be_given(migrated):
    _, new, _ = migrated(GATED, "--provider", "acme")
    assert set(new["mg_gated"].impls) == {"native", "acme_cpu"}


def test_an_op_that_exists_is_pointed_at_and_not_declared_again(migrated):
    _, new, printed = migrated(GATED.replace("mg_gated", "silu_and_mul"))
    assert "# Note: ir.ops.silu_and_mul exists: silu_and_mul(Tensor x) -> Tensor" in printed
    assert new["custom_silu_and_mul"] is ir.ops.custom_silu_and_mul


def test_hip_and_cuda_of_their_own_are_told_apart(migrated):
    _, new, printed = migrated("""
    class MgTwo(CustomOp):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2
        def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
            return x + x
        def forward_hip(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward_cuda(x) * 1
    """)
    assert set(new["mg_two"].impls) == {"native", "custom_cuda", "custom_hip"}
    assert printed.count("torch.version.hip is None") == printed.count("torch.version.hip is not None") == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("self.calls += 1", "self.calls is written"),
        ("y = self.config.scale", "what self.config is cannot be read"),
        ("y = helper(self, x)", "self is handed on whole"),
        ("y = super().forward_native(x)", "super() stands for a base class"),
        ("y = self.child(x)", "what self.child is cannot be read"),
    ],
)
def test_what_an_op_cannot_do_is_listed_with_its_line_and_gives_no_op(line, what, migrated):
    body = f"""
        def helper(layer, x):
            return x

        class MgState(CustomOp):
            def __init__(self, config=None):
                super().__init__()
                self.config, self.child = config, nn.Identity()
                self.calls = 0

            def forward_native(self, x: torch.Tensor) -> torch.Tensor:
                {line}
                return x
        """
    _, new, printed = migrated(body, code=1)
    number = [text.strip() for text in (HEAD + textwrap.dedent(body)).splitlines()].index(line) + 1
    assert f"#   line {number}: {what}" in printed
    assert "register_op" not in printed
    assert "MgState" not in new


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("def forward_native(self, x: torch.Tensor, *more): return x", "*args or **kwargs"),
        ("def forward_native(self, x: dict) -> torch.Tensor: return x", "dict has no word in an op's schema"),
        ("def forward_cuda(self, x): return x", "there is no forward_native"),
    ],
)
def test_a_class_that_cannot_become_an_op_says_why(method, what, migrated):
    _, _, printed = migrated(f"class MgNone(CustomOp):\n    {method}\n", code=1)
    assert what in printed
    assert "register_op" not in printed


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("assert x.shape[0] > 0", "assert x.shape[0] > 0 stays in forward_cpu"),
        ("y = self.unknown", "what self.unknown is"),
    ],
)
def test_what_is_not_translated_in_an_implementation_leaves_the_op(line, what, migrated):
    _, new, printed = migrated(
        f"""
        class MgPart(CustomOp):
            def forward_native(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2
            def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
                {line}
                return x + x
        """,
        code=1,
    )
    assert what in printed
    assert new["MgPart"]()(torch.ones(2)).tolist() == [2, 2]
    assert ("custom_cpu" in new["mg_part"].impls) is ("assert" in line)


def test_a_meaning_that_overwrites_its_argument_is_named(migrated):
    _, _, printed = migrated(
        """
        class MgWrites(CustomOp):
            def forward_native(self, x: torch.Tensor) -> torch.Tensor:
                x.mul_(2)
                return x + 1
        """,
        code=1,
    )
    assert "line 9: forward_native writes to x" in printed


def test_a_replacement_whose_original_is_elsewhere_is_left_to_a_person(migrated):
    _, _, printed = migrated(
        """
        class Base(CustomOp):
            def forward_native(self, x: torch.Tensor) -> torch.Tensor:
                return x

        Elsewhere = type("Elsewhere", (Base,), {})

        @CustomOp.register_oot(name="Elsewhere")
        class Vendor(Elsewhere):
            def forward_oot(self, x):
                return x
        """,
        code=1,
    )
    assert "it replaces Elsewhere, which is not in this file" in printed


def test_json_has_the_same(tmp_path, as_json):
    file = tmp_path / "layers.py"
    file.write_text(HEAD + NORM)
    code, document = as_json("migrate", str(file))
    assert code == 0
    (found,) = document["classes"]
    assert found["class"] == "MgNorm"
    assert found["ops"] == ["mg_norm", "mg_norm_with_residual"]
    assert {"op": "mg_norm", "provider": "custom_cpu", "predicate": True} in found["implementations"]
    assert found["not_translated"] == []
    ast.parse(document["imports"] + found["code"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("def f(:\n", "no Python"), ("x = 1\n", "no class here"), (None, "cannot be read")],
)
def test_a_file_that_cannot_be_migrated_is_one_error(text, message, tmp_path, capsys):
    file = tmp_path / "layers.py"
    if text is not None:
        file.write_text(text)
    assert main(["migrate", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_libcst_is_named_with_the_extra(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("libcst", "irframework.cli.migrate_"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    import irframework.cli

    for name in [name for name in vars(irframework.cli) if name.startswith("migrate_")]:
        monkeypatch.delattr(irframework.cli, name)
    assert main(["migrate", str(tmp_path / "layers.py")]) == 1
    assert "pip install 'irframework[migrate]'" in capsys.readouterr().err
