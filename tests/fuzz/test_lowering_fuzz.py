"""Random programs, lowered and run without code generation, equal eager native: outputs, arguments, gradients.

A failure prints the program's source, and hypothesis the seed: `--hypothesis-seed=N` draws the same programs again.
"""

import pytest
from comparing import check
from hypothesis import HealthCheck, given, settings
from statements import KINDS, KINDS_WITH_BREAKS
from strategies import programs

FEW = settings(
    deadline=None, database=None, print_blob=False, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@given(program=programs(KINDS))
@settings(FEW, max_examples=180)
def test_lowered_programs_equal_eager_native(program, tally):
    check(program, "lowered", tally=tally)


@pytest.mark.slow
@given(program=programs(KINDS_WITH_BREAKS, shapes=("dynamic", "marked"), modes=("no_grad",), steps=6))
@settings(FEW, max_examples=20)
def test_lowered_programs_of_any_size_equal_eager_native(program, tally):
    check(program, "lowered", tally=tally)
