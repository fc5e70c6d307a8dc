"""Tests that are functions of a rank: each of some ranks calls them, with pytest's parameters.

@on_ranks(2)
def test_ranks_sum():
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_testing import expect_on_ranks, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    Test = Callable[..., object]


def on_ranks(num_ranks: int, **limits: float) -> Callable[[Test], Test]:
    """Call the test on ranks, as `run_on_ranks` does, which has the limits."""
    return _dispatched(lambda test, parameters: run_on_ranks(test, num_ranks, **limits, **parameters))


def raises_on_ranks(
    error: type[BaseException] | tuple[type[BaseException], ...], match: str, num_ranks: int, **limits: float
) -> Callable[[Test], Test]:
    """Expect an error of the test on every rank, as `expect_on_ranks` does."""
    return _dispatched(lambda test, parameters: expect_on_ranks(error, match, test, num_ranks, **limits, **parameters))


def _dispatched(dispatch: Callable[[Test, dict[str, Any]], object]) -> Callable[[Test], Test]:
    def decorate(function: Test) -> Test:
        @functools.wraps(function)
        def test(**parameters: Any) -> None:
            if dist.is_initialized():  # on a rank, which found the test under its name
                function(**parameters)
            else:
                dispatch(test, parameters)

        return test

    return decorate
