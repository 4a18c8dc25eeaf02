"""Random programs through Inductor equal eager native, by both ways into it."""

import pytest
from comparing import check
from hypothesis import HealthCheck, given, settings
from statements import KINDS
from strategies import programs

FEW = settings(
    deadline=None, database=None, print_blob=False, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["irframework", "stock"])
def test_programs_through_inductor_equal_eager_native(backend, tally):
    @given(program=programs(KINDS, shapes=("static",), steps=8))
    @settings(FEW, max_examples=5)
    def compare(program):
        check(program, backend, tally=tally)

    compare()
