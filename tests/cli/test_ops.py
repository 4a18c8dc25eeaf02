"""`irframework ops`: the matrix of all ops, and what is known of one."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import irframework as ir
from irframework.cli import main, op_matrix, tables

Json = Callable[..., tuple[int, Any]]


def matrix(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["ops"]) == 0
    return capsys.readouterr().out


def rows_of(text: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_every_op_has_a_row_with_a_cell_for_each_provider(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(matrix(capsys))
    providers = rows["op"]
    assert providers[0] == "native"
    for name in ir.ops.__all__:
        assert len(rows[name]) == len(providers)
        assert rows[name].count("chosen") == 1


def test_an_op_stands_under_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    lines = matrix(capsys).splitlines()
    heading = max(i for i, line in enumerate(lines) if line.endswith(":") and i < _line_of(lines, "mla_attention"))
    assert lines[heading] == "attention:"


def _line_of(lines: list[str], op: str) -> int:
    return next(i for i, line in enumerate(lines) if line.startswith(f"{op} "))


def test_standard_ops_and_the_repositorys_providers_fit_in_a_hundred_columns() -> None:
    ours = ("native", "aiter", "triton", "vllm_c", "xpu_kernels")
    rows = [(name, *(["chosen"] + ["yes"] * (len(ours) - 1))) for name in ir.ops.__all__]
    shown = tables.plain_table("", ("op", *ours), rows)
    assert max(map(len, shown.splitlines())) <= 100


def test_a_cell_says_what_a_provider_is_to_an_op(as_json: Json, declare: Callable[..., ir.IrOp]) -> None:
    op = declare()
    op.register_input_generator(lambda shape, dtype, device: (torch.ones(shape, dtype=dtype, device=device),))
    op.register_impl("taken", supported=True)(op.native)
    op.register_impl("later", supported=True)(op.native)
    op.register_impl("broken", supported=False)(op.native)
    with ir.priority({op.name: ["taken"]}):
        (document,) = as_json("ops", op.name)[1]
    shown = document["providers"]
    states = {name: shown[name] for name in ("native", "taken", "later", "broken")}
    assert states == {"native": "supported", "taken": "chosen", "later": "supported", "broken": "unsupported"}
    assert all(state == "no" for name, state in shown.items() if name not in states)


def test_an_op_without_a_generator_has_no_chosen_provider(as_json: Json, declare: Callable[..., ir.IrOp]) -> None:
    (document,) = as_json("ops", declare().name)[1]
    assert document["providers"]["native"] == "supported"


def test_an_op_of_nobodys_family_stands_with_the_others(declare: Callable[..., ir.IrOp]) -> None:
    op = declare()
    assert list(op_matrix.by_family([op, ir.ops.all_reduce, ir.ops.rms_norm])) == ["norm", "collectives", "others"]


def test_every_module_with_ops_has_one_family() -> None:
    modules = [m.name for m in pkgutil.iter_modules(ir.ops.__path__)]
    owners = [name for name in modules if _declares_ops(name)]
    assert sorted(name for names in op_matrix.FAMILIES.values() for name in names) == sorted(owners)


def _declares_ops(module: str) -> bool:
    values = vars(importlib.import_module(f"irframework.ops.{module}")).values()
    return any(isinstance(v, ir.IrOp) and v.native.__module__ == f"irframework.ops.{module}" for v in values)


def test_of_one_op_all_implementations_are_listed(as_json: Json) -> None:
    code, document = as_json("ops", "rms_norm")
    assert code == 0
    (op,) = document
    assert (op["name"], op["family"]) == ("rms_norm", "norm")
    native = op["implementations"][0]
    assert (native["provider"], native["supported"]) == ("native", True)


def test_of_one_op_the_reasons_are_shown(capsys: pytest.CaptureFixture[str], declare: Callable[..., ir.IrOp]) -> None:
    op = declare()
    op.register_impl("absent", supported=ir.reject("no libfast on this machine"))(op.native)
    assert main(["ops", op.name]) == 0
    assert "no libfast on this machine" in capsys.readouterr().out


def test_verbose_shows_everything_of_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "rotary_embedding(Tensor positions" in out
    assert "maybe_inplace gives away: x, x_residual" in out


def test_a_terminal_gets_the_same_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(tables, "_is_seen", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "100")
    tables.print_groups(("op", "native"), {"norm": [("rms_norm", "chosen")], "MoE": [("fused_moe", "-")]})
    assert rows_of(capsys.readouterr().out) == {
        "op": ["native"],
        "norm": [],
        "rms_norm": ["chosen"],
        "MoE": [],
        "fused_moe": ["-"],
    }
