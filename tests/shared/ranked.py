"""Tests that are functions of a rank: each of some ranks calls them, with pytest's parameters.

@on_ranks(2)
def test_ranks_sum():
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2
"""

import functools
import inspect

import torch.distributed as dist

from booster_testing import expect_on_ranks, run_on_ranks


def on_ranks(num_ranks, **limits):
    """Call the test on ranks, as `run_on_ranks` does, which has the limits.

    Args:
        num_ranks: Their number, the parameter of the test that has it, or a function of parameters, which it names.
        limits: As for `run_on_ranks`.
    """

    def dispatch(test, parameters):
        return run_on_ranks(test, number_of(num_ranks, parameters), *parameters.values(), **limits)

    return dispatched(dispatch)


def raises_on_ranks(error, match, num_ranks, **limits):
    """Expect an error of the test on every rank, as `expect_on_ranks` does; ``num_ranks`` is as for `on_ranks`."""

    def dispatch(test, parameters):
        number = number_of(num_ranks, parameters)
        return expect_on_ranks(error, match, test, number, *parameters.values(), **limits)

    return dispatched(dispatch)


def number_of(num_ranks, parameters):
    """Return the number of ranks of a test, which `on_ranks` is given, for its parameters."""
    if isinstance(num_ranks, int):
        return num_ranks
    if isinstance(num_ranks, str):
        return parameters[num_ranks]
    return num_ranks(*(parameters[name] for name in inspect.signature(num_ranks).parameters))


def dispatched(dispatch):
    """Return a decorator of tests that ranks call: elsewhere a function gets the test and its parameters by name."""

    def decorate(function):
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(*values, **parameters):
            if dist.is_initialized():  # on a rank, which found the test under its name
                function(**dict(zip(names, values, strict=True)))
            else:
                dispatch(test, {name: parameters[name] for name in names})

        return test

    return decorate
