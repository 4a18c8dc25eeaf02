import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from irframework.cli import main


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom irframework.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False False"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as left:
        main(["docter"])
    assert left.value.code == 2


@pytest.mark.parametrize("command", ["run", "doctor", "ops", "explain", "bench"])
def test_every_command_takes_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--json" in capsys.readouterr().out


def test_a_mistake_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rms_nrom"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: There is no op 'rms_nrom'. Did you mean 'rms_norm'")
    assert captured.err.count("\n") == 1


def test_a_mistake_is_a_document_with_json(as_json: Callable[..., tuple[int, Any]]) -> None:
    code, document = as_json("run", "--model", "smolm2")
    assert code == 1
    assert document["error"]["type"] == "ModelNotFoundError"
