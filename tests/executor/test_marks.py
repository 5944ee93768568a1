"""On an asynchronous backend the marks alone keep the order: the same values as when each action is done before the next is issued."""

from __future__ import annotations

import numpy as np
import pytest

from executor.train import run
from tests.executor.late import LateBackend
from tests.executor.programs import pipeline
from tests.executor.test_train import DATA


@pytest.mark.parametrize(("num_microbatches", "dp"), [(4, 2), (2, 4)])
def test_marks_carry_every_wait_to_the_device(num_microbatches, dp):
    program = pipeline(num_microbatches, dp)
    expected = run(program, data=DATA, steps=3, seed=1)
    late = LateBackend()
    found = run(program, data=DATA, steps=3, seed=1, backend=late)
    assert not any(stream.errors for stream in late.streams)
    for name in expected.tensors:
        assert np.array_equal(found.tensor(name), expected.tensor(name)), name
    assert len(found.timeline.spans) == len(expected.timeline.spans)


def test_without_heeding_them_values_are_wrong():
    """The test above can fail: the same backend that waits for no mark gives other numbers."""
    program = pipeline(4, 2)
    expected = run(program, data=DATA, steps=3, seed=1)
    found = run(program, data=DATA, steps=3, seed=1, backend=LateBackend(heed=False))
    assert not all(np.array_equal(found.tensor(name), expected.tensor(name)) for name in expected.tensors)
