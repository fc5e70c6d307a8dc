"""Random batches: each field is a recipe for one argument of a model's forward, a function of generator and samples."""

import torch


def batch_of(**recipes):
    """Return a function that draws a batch with one tensor for each recipe, in their order."""

    def draw(generator, samples):
        return {name: recipe(generator, samples) for name, recipe in recipes.items()}

    return draw


def numbers(high, *shape, low=0):
    """Return a recipe for whole numbers from ``low`` to ``high - 1``, shape ``(samples, *shape)``."""
    return lambda generator, samples: torch.randint(low, high, (samples, *shape), generator=generator)


def normal(*shape):
    """Return a recipe for normally distributed values, shape ``(samples, *shape)``."""
    return lambda generator, samples: torch.randn(samples, *shape, generator=generator)


def same(values):
    """Return a recipe for values that are the same in each sample."""
    return lambda _generator, samples: torch.stack([torch.as_tensor(values)] * samples)
