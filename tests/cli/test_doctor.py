import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from irframework.cli import installed_metadata, main

Process = Callable[..., subprocess.CompletedProcess[str]]
Distribution = Callable[..., Path]

IMPLEMENTATION = """
    @ir.hookimpl
    def irframework_register_impls():
        @ir.ops.rms_norm.register_impl("{provider}"{more})
        def rms_norm(x, weight, epsilon, variance_size=None):
            return ir.ops.rms_norm.native(x, weight, epsilon, variance_size)
"""


def doctor(process: Process, **environment: str) -> tuple[int, Any]:
    done = process("doctor", "--json", **environment)
    return done.returncode, json.loads(done.stdout)


def problems(document: Any) -> dict[str, str]:
    return {f["subject"]: f["text"] for f in document["findings"] if f["severity"] == "problem"}


def notes(document: Any) -> dict[str, str]:
    return {f["subject"]: f["text"] for f in document["findings"] if f["severity"] == "note"}


def test_this_installation_is_healthy(process: Process) -> None:
    code, document = doctor(process)
    assert problems(document) == {}
    assert code == 0


def test_the_page_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    for title in ("Environment", "Plugins", "Implementations", "How a usual call"):
        assert title in out


def test_a_plugin_that_raises_is_a_problem_with_its_cause(process: Process, distribution: Distribution) -> None:
    distribution("bad", "import a_requirement_that_is_missing")
    code, document = doctor(process)
    assert code == 1
    assert "a_requirement_that_is_missing" in problems(document)["plugin bad"]
    status = {plugin["name"]: plugin["status"] for plugin in document["plugins"]}
    assert status["bad"] == "quarantined"


def test_strict_mode_fails_with_one_error(process: Process, distribution: Distribution) -> None:
    distribution("bad", "raise RuntimeError('no driver')")
    done = process("doctor", IRFRAMEWORK_STRICT="1")
    assert done.returncode == 1
    assert "no driver" in done.stderr.splitlines()[-1]


def test_a_priority_for_a_failed_provider_gives_the_cause(process: Process, distribution: Distribution) -> None:
    distribution("failing", "raise RuntimeError('no driver')")
    code, document = doctor(process, IRFRAMEWORK_OP_PRIORITY="rms_norm=failing")
    assert code == 1
    assert "no driver" in problems(document)["rms_norm"]


def test_a_disabled_plugin_is_a_note(process: Process, distribution: Distribution) -> None:
    distribution("good", IMPLEMENTATION.format(provider="good", more=""))
    code, document = doctor(process, IRFRAMEWORK_DISABLE_PLUGINS="good")
    assert code == 0
    assert "IRFRAMEWORK_DISABLE_PLUGINS" in notes(document)["plugin good"]


def test_an_allow_list_that_names_nothing_is_a_problem(process: Process, distribution: Distribution) -> None:
    distribution("good", IMPLEMENTATION.format(provider="good", more=""))
    code, document = doctor(process, IRFRAMEWORK_PLUGINS="goood")
    assert code == 1
    assert "Did you mean 'good'" in problems(document)["IRFRAMEWORK_PLUGINS"]


def test_a_misspelt_setting_is_a_problem(process: Process) -> None:
    code, document = doctor(process, IRFRAMEWORK_OP_PRIORTY="rms_norm=native")
    assert code == 1
    assert "IRFRAMEWORK_OP_PRIORITY" in problems(document)["IRFRAMEWORK_OP_PRIORTY"]


def test_a_priority_for_an_unknown_op_is_a_problem(process: Process) -> None:
    code, document = doctor(process, IRFRAMEWORK_OP_PRIORITY="zzz=native;rms_nrom=native")
    assert code == 1
    (said,) = [f["text"] for f in document["findings"] if "rms_nrom" in f["text"]]
    assert "Did you mean 'rms_norm'" in said
    assert any("'zzz'" in f["text"] for f in document["findings"])


def test_an_unsupported_implementation_has_its_reason(process: Process, distribution: Distribution) -> None:
    body = "def here():\n    raise OSError('no libthing')\n" + IMPLEMENTATION.format(
        provider="good", more=", supported=here"
    ).replace("\n    ", "\n")
    distribution("good", body)
    code, document = doctor(process)
    assert code == 0
    found = {(i["provider"], i["op"]): i for i in document["implementations"]}["good", "rms_norm"]
    assert not found["supported"]
    assert "no libthing" in found["unsupported_reason"]


def test_an_implementation_in_no_list_is_noted(process: Process, distribution: Distribution) -> None:
    more = ', supports_args=ir.supports(none=("weight",))'
    distribution("good", IMPLEMENTATION.format(provider="good", more=more))
    document = doctor(process)[1]
    assert "in no priority list" in notes(document)["rms_norm:good"]


def test_an_implementation_behind_one_that_takes_every_call(process: Process, distribution: Distribution) -> None:
    distribution("aaa-first", IMPLEMENTATION.format(provider="aaa", more=""))
    distribution("zzz-last", IMPLEMENTATION.format(provider="zzz", more=""))
    document = doctor(process, IRFRAMEWORK_PLUGINS="aaa-first,zzz-last")[1]
    assert "aaa stands before it" in notes(document)["rms_norm:zzz"]


def test_an_implementation_behind_one_that_compiled_code_may_do_without(
    process: Process, distribution: Distribution
) -> None:
    more = ", compiled_where=lambda x: x.dim() == 2"
    distribution("aaa-first", IMPLEMENTATION.format(provider="aaa", more=more))
    distribution("zzz-last", IMPLEMENTATION.format(provider="zzz", more=""))
    document = doctor(process, IRFRAMEWORK_PLUGINS="aaa-first,zzz-last")[1]
    assert "stands before it" not in notes(document)["rms_norm:zzz"]


def test_an_implementation_for_another_device_is_noted(process: Process, distribution: Distribution) -> None:
    distribution("good", IMPLEMENTATION.format(provider="good", more=', device_types=("xpu",)'))
    document = doctor(process)[1]
    assert "runs on xpu" in notes(document)["rms_norm:good"]


PLATFORM = """
    class Mine(ir.Platform):
        name = "{name}"
        device_types = ("cpu",)
        def is_available(self):
            return True

    @ir.hookimpl
    def irframework_platforms():
        return [Mine()]
"""


def test_two_platforms_that_claim_the_machine(process: Process, distribution: Distribution) -> None:
    distribution("dev-one", PLATFORM.format(name="one"))
    distribution("dev-two", PLATFORM.format(name="two"))
    code, document = doctor(process)
    assert code == 1
    text = problems(document)["platform"]
    assert "dev_one" in text
    assert "dev_two" in text
    assert "IRFRAMEWORK_PLATFORM" in text
    assert doctor(process, IRFRAMEWORK_PLATFORM="two")[0] == 0


def test_an_empty_metadata_directory_is_a_problem(process: Process, distribution: Distribution, tmp_path: Path) -> None:
    distribution("good", IMPLEMENTATION.format(provider="good", more=""), version="0.2")
    (tmp_path / "good-0.1.dist-info").mkdir()
    code, document = doctor(process)
    assert code == 1
    text = problems(document)["metadata"]
    assert "good-0.1.dist-info is empty" in text
    assert "good-0.2.dist-info" in text


def test_doctor_imports_no_transformers(process: Process) -> None:
    code = (
        "import sys\nfrom irframework.cli import main\nmain(['doctor'])\n"
        "print([name for name in ('transformers', 'triton', 'torch._inductor.compile_fx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


GROUP = "irframework.plugins"


def test_stale_metadata_without_a_plugin_ahead_of_the_real_one(tmp_path: Path) -> None:
    stale, real = tmp_path / "stale", tmp_path / "real"
    (stale / "good.egg-info").mkdir(parents=True)
    (stale / "good.egg-info" / "PKG-INFO").write_text("Name: good\nVersion: 0.1\n")
    (real / "good-0.2.dist-info").mkdir(parents=True)
    (real / "good-0.2.dist-info" / "METADATA").write_text("Name: good\nVersion: 0.2\n")
    (real / "good-0.2.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\ngood = good\n")
    (text,) = installed_metadata.problems(installed_metadata.scan(GROUP, [str(stale), str(real)]))
    assert str(stale) in text
    assert str(real) in text
    assert "declares no plugin" in text


def test_the_same_version_twice_is_no_problem(tmp_path: Path) -> None:
    for place in ("source", "installed"):
        metadata = tmp_path / place / "good-0.2.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Name: good\nVersion: 0.2\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\ngood = good\n")
    paths = [str(tmp_path / "source"), str(tmp_path / "installed")]
    assert installed_metadata.problems(installed_metadata.scan(GROUP, paths)) == []


def test_duplicates_of_other_packages_are_not_ours(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        metadata = tmp_path / f"numpy-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: numpy\nVersion: {version}\n")
    assert installed_metadata.problems(installed_metadata.scan(GROUP, [str(tmp_path)])) == []
