"""Testing implementations: whether they keep their op's contract."""

from irframework.testing.contracts import Checked, check_contract, check_contracts
from irframework.testing.trial import Violation

__all__ = ["Checked", "Violation", "check_contract", "check_contracts"]
