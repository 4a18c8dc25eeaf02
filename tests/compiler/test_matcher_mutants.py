"""Each rule of the matcher is switched off, and the test of that rule fails: none of them is there for nothing."""

import pytest
import test_fusion_seen
import test_fusion_spellings
from mutation import Mutant, StaleError, applied, called, conditions, excused, mutants

from irframework.registry import registry

_CRASHES = (NameError, SyntaxError, StaleError)  # by which a mutant would die of itself
MUTANTS = mutants()
op, environment, spelt = test_fusion_seen.op, test_fusion_seen.environment, test_fusion_spellings.spelt  # fixtures


@pytest.fixture(autouse=True)
def _no_other_ops(monkeypatch):
    """The tests bring the ops that they need; those of this framework would be derived again for each mutant."""
    for op in registry.ops.values():
        monkeypatch.setattr(op, "fuse", False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule.replace(" ", "_"))
def test_a_rule_that_is_switched_off_fails_its_test(mutant: Mutant, request):
    with applied(mutant), pytest.raises((Exception, pytest.fail.Exception)) as failed:
        called(mutant.test, request.getfixturevalue)
    assert not isinstance(failed.value, _CRASHES), f"{mutant.rule}: {failed.value!r} is no answer"


def test_every_rule_has_one_line():
    rules = [mutant.rule for mutant in MUTANTS]
    assert sorted(set(rules)) == sorted(rules)


@pytest.mark.parametrize("module", ["matches", "candidates", "places", "argument_choices", "fusion"])
def test_each_condition_has_a_mutant_or_an_excuse(module):
    excuses = excused()
    for where, text in conditions(module):
        mutants_of_it = [each for each in MUTANTS if each.where == where and each.old and each.old in text]
        excuse = [each for each in excuses if each[0] == where and text.startswith(each[1])]
        assert bool(mutants_of_it) != bool(excuse), f"{where}: {text}"
