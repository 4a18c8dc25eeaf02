from collections.abc import Callable
from typing import Any

import pytest

import irframework as ir
from irframework.cli import main

Json = Callable[..., tuple[int, Any]]


def test_the_table_shows_who_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rms_norm", "--shape", "8x4096", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "8x4096, bfloat16, cpu, eager" in out
    assert "->" in out
    assert "native" in out


def test_the_command_lines_priority_counts(as_json: Json) -> None:
    code, document = as_json("explain", "rms_norm", "--ir-op-priority.rms_norm", "native")
    assert code == 0
    assert document["provider"] == "native"
    assert document["candidates"][0] == {"provider": "native", "accepted": True, "reason": None, "origin": "cli"}


@pytest.mark.parametrize("op", ir.ops.__all__)
def test_every_standard_op_can_be_explained(as_json: Json, op: str) -> None:
    code, document = as_json("explain", op)
    assert code == 0
    assert document["op"] == op


def test_a_device_that_is_not_here_can_be_explained(as_json: Json) -> None:
    document = as_json("explain", "rms_norm", "--device", "cuda")[1]
    assert document["device"] == "cuda"
    assert document["provider"] == "native"


def test_a_large_shape_costs_no_memory(as_json: Json) -> None:
    assert as_json("explain", "rms_norm", "--shape", "1000000x100000")[0] == 0


def test_a_word_that_is_no_device(as_json: Json) -> None:
    code, document = as_json("explain", "rms_norm", "--device", "gpu0")
    assert code == 1
    assert document["error"]["type"] == "DeviceUnavailableError"


@pytest.mark.parametrize("text", ["8 by 9", "8x", "-1x4"])
def test_a_malformed_shape_is_wrong_usage(text: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["explain", "rms_norm", f"--shape={text}"])
    assert left.value.code == 2


def test_an_unknown_provider_names_those_that_are_known(as_json: Json) -> None:
    code, document = as_json("explain", "rms_norm", "--ir-op-priority.rms_norm", "nativ")
    assert code == 1
    assert "native" in document["error"]["message"]


def test_an_op_without_a_generator_says_what_to_do(as_json: Json, declare: Callable[..., ir.IrOp]) -> None:
    code, document = as_json("explain", declare().name)
    assert code == 1
    assert "register_input_generator" in document["error"]["message"]


@pytest.mark.parametrize("option", ["--ir-op-priority.rms_nrom=native", "--ir-op-priority.rms=native"])
def test_a_priority_for_an_unknown_op_names_the_closest(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["explain", "rms_norm", option]) == 1
    assert "Did you mean 'rms_norm'" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["99999999999999999999x4", "999999999999x99999999999"])
def test_a_shape_beyond_all_memory_is_wrong_usage(capsys: pytest.CaptureFixture[str], shape: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["explain", "rms_norm", "--shape", shape])
    assert leaving.value.code == 2
    assert "larger than any memory" in capsys.readouterr().err
