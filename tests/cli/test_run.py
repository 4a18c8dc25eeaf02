import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from irframework.cli import compare, main

Json = Callable[..., tuple[int, Any]]
TINY = ("run", "--model", "random:llama-tiny", "--max-new-tokens", "4")
# Compiled code on CPUs leaves a single row to Inductor, unless somebody asks for kernels.
OPS = ("fused_add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul")
BY_KERNELS = tuple(word for op in OPS for word in (f"--ir-op-priority.{op}", "vllm_c?"))


@pytest.fixture(autouse=True)
def no_leftover_compilation() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_the_default_answer_names_paris(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    assert main(["run"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out.splitlines()[0]
    assert "loading smollm2" in captured.err
    assert "fused_add_rms_norm" in captured.out
    assert "tokens/s" in captured.out


def test_eager_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY]) == 0
    out = capsys.readouterr().out
    for text in ("rms_norm", "silu_and_mul", "rotary_embedding", "why not the others", "prefill", "decode"):
        assert text in out


def test_eager_document(as_json: Json) -> None:
    code, document = as_json(*TINY)
    assert code == 0
    assert len(document["tokens"]) == 4
    counts = {row["op"]: row["count"] for row in document["decisions"]}
    assert counts == {"fused_add_rms_norm": 2, "rms_norm": 3, "rotary_embedding": 2, "silu_and_mul": 2}
    assert document["prefill_tokens_per_second"] > 0
    assert document["decode_tokens_per_second"] > 0


def test_the_command_lines_priority_runs(as_json: Json) -> None:
    document = as_json(*TINY, "--ir-op-priority.rms_norm", "native")[1]
    providers = {row["op"]: row["provider"] for row in document["decisions"]}
    assert providers["rms_norm"] == "native"


def test_compiled_gives_the_tokens_of_eager_and_compiles_twice(as_json: Json) -> None:
    eager = as_json(*TINY, "--max-new-tokens", "8")[1]
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        code, compiled = as_json(*TINY, "--max-new-tokens", "8", "--mode", "compile", *BY_KERNELS)
    assert code == 0
    assert compiled["tokens"] == eager["tokens"]
    counts = {row["op"]: row["count"] for row in compiled["decisions"]}
    # The adapter fuses the addition inside each of the two layers, the compiler the one in front of the next norm too.
    assert counts == {"fused_add_rms_norm": 4, "rms_norm": 1, "rotary_embedding": 2, "silu_and_mul": 2}


def test_compiled_ops_say_why_the_others_did_not_run(as_json: Json) -> None:
    compiled = as_json(*TINY, "--mode", "compile", *BY_KERNELS)[1]
    for row in compiled["decisions"]:
        assert {"provider": "native", "reason": f"{row['provider']} comes first"} in row["others"]


def test_compare_measures_four_variants_on_the_same_tokens(as_json: Json) -> None:
    code, document = as_json(*TINY, "--compare", "--repeats", "2")
    assert code == 0
    variants = {line["variant"]: line for line in document["variants"]}
    assert list(variants) == ["transformers eager", "irframework eager", "torch.compile", "irframework compiled"]
    assert variants["transformers eager"]["largest_logit_difference"] == 0
    for line in variants.values():
        assert line["largest_logit_difference"] < 1e-4
        assert line["same_tokens"]
        assert line["decode_tokens_per_second"]["low"] <= line["decode_tokens_per_second"]["high"]
    pairs = {ratio["variant"]: ratio["over"] for ratio in document["ratios"]}
    assert pairs == {"irframework eager": "transformers eager", "irframework compiled": "torch.compile"}
    for ratio in document["ratios"]:
        decode = ratio["decode"]
        assert 0 < decode["lower_quartile"] <= decode["median"] <= decode["upper_quartile"]


def test_rates_are_compared_within_a_round() -> None:
    rates = {"ours": [(2.0, 8.0), (20.0, 30.0), (6.0, 9.0)], "theirs": [(1.0, 4.0), (10.0, 10.0), (2.0, 9.0)]}
    ratio = compare._ratio("ours", "theirs", rates)
    assert (ratio.prefill.low, ratio.prefill.median, ratio.prefill.high) == (2.0, 2.0, 2.5)
    assert ratio.decode is not None
    assert (ratio.decode.low, ratio.decode.median, ratio.decode.high) == (1.5, 2.0, 2.5)
    alone = compare._ratio("ours", "theirs", {"ours": [(3.0, None)], "theirs": [(2.0, None)]})
    assert (alone.prefill.median, alone.decode) == (1.5, None)


def test_compare_prints_rates_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--compare", "--repeats", "1", "--max-new-tokens", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Tokens per second, median [low-high] of 1" in printed
    assert "How fast over another one in the same round, median [quartiles]" in printed


def test_one_token_has_no_decode_rate(as_json: Json) -> None:
    code, document = as_json("run", "--model", "random:qwen2-tiny", "--max-new-tokens", "1")
    assert code == 0
    assert document["decode_tokens_per_second"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16"])
def test_other_dtypes(as_json: Json, dtype: str) -> None:
    code, document = as_json(*TINY, "--dtype", dtype)
    assert code == 0
    assert document["dtype"] in ("bfloat16", "float16")


def test_the_seed_makes_the_weights(as_json: Json) -> None:
    first, again, other = (as_json(*TINY, "--seed", seed)[1]["tokens"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_a_truncated_model_file(tmp_path: Path, as_json: Json) -> None:
    (tmp_path / "half.gguf").write_bytes(b"GGUF\3\0\0\0")
    code, document = as_json("run", "--model", str(tmp_path / "half.gguf"))
    assert code == 1
    assert document["error"]["type"] == "ModelFileError"


def test_an_unknown_device(as_json: Json) -> None:
    code, document = as_json(*TINY, "--device", "nowhere")
    assert code == 1
    assert "nowhere" in document["error"]["message"]


@pytest.mark.parametrize("arguments", [("--max-new-tokens", "0"), ("--dtype", "int8"), ("--mode", "jit")])
def test_wrong_usage(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", *arguments])
    assert left.value.code == 2


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == TINY[2]


def test_a_model_that_nothing_fits_is_spoken_up_about(capsys: pytest.CaptureFixture[str]) -> None:
    from irframework.cli.run import warn_if_untouched
    from irframework.integrations.patch_report import PatchReport, Skipped

    warn_if_untouched(PatchReport("Odd", (), (Skipped("norm", "rms_norm", "its formula is odd"),)))
    assert "no module of this Odd" in capsys.readouterr().err


def test_a_reason_that_ops_share_stands_once() -> None:
    from irframework.cli.decisions import DecisionRow, cells_and_notes

    shared = ("elsewhere", "not on this machine")
    rows = [DecisionRow("a", 1, "native", (shared,)), DecisionRow("b", 2, "native", (shared, ("own", "too wide")))]
    cells, notes = cells_and_notes(rows)
    assert [row[3] for row in cells] == ["elsewhere [1]", "elsewhere [1], own: too wide"]
    assert notes == ["[1] elsewhere: not on this machine"]


@pytest.mark.parametrize("options", [("--seed", "-1"), ("--seed", str(10**30)), ("--prompt", "\udcff")])
def test_an_option_that_torch_or_a_tokenizer_would_choke_on_is_wrong_usage(options: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--model", "random:llama-tiny", *options])
    assert leaving.value.code == 2
