"""Models of the zoo that are built lazily have bitwise the weights of eager construction under the same seed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from isolated_libraries import FOLDER, missing_libraries
from matrix import matrix
from model_zoo import ZOO, get_model

from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, materialize
from booster_testing import run_on_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

RUN_EAGERLY: dict[str, dict[str, int]] = {}
"""Operations that ran eagerly because they can't be recorded, by model: none in the zoo."""

pytestmark = pytest.mark.usefixtures("ranks_with_isolated_libraries")


def build_both(name: str) -> dict[str, Any]:
    """Build a model eagerly and lazily from one seed, and return the differences."""
    zoo = get_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries about their own models
        torch.manual_seed(0)
        eager = zoo.build()
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)
        with LazyInitContext() as context:
            lazy = zoo.build()
        was_lazy, parameters = is_lazy(lazy), list(lazy.parameters())
        materialize(lazy)
    expected, actual = tensors_of(eager), tensors_of(lazy)
    return {
        "lazy": was_lazy,
        "names": sorted(expected.keys() ^ actual.keys()),
        "values": [name for name in expected if not is_same(actual[name], expected[name])],
        "ties": ties_of(expected) == ties_of(actual),
        "kept": all(now is before for now, before in zip(lazy.parameters(), parameters, strict=True)),
        "generator": torch.equal(torch.get_rng_state(), generator_state),
        "run_eagerly": context.run_eagerly,
    }


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, including tied and non-persistent ones."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def ties_of(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor, to compare ties."""
    by_object: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_object.setdefault(id(tensor), []).append(name)
    return sorted(by_object.values())


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type and bits; uninitialized memory is not compared."""
    if type(one) is not type(other) or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        return False
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


@matrix(
    [
        "transformers/llama_tied",
        "transformers/gpt2_double_heads",
        "transformers/albert",
        "transformers/vit_classification",
        "torchrec/deepfm",
    ],
    name=list(ZOO),
)
def test_lazy_weights_equal_eager_ones(name):
    if missing := missing_libraries(ZOO[name].needs):
        pytest.skip(f"{', '.join(missing)} not installed, neither in the environment nor in {FOLDER}")
    (result,) = run_on_ranks(build_both, 1, name, timeout_seconds=120)
    assert result == {
        "lazy": True,
        "names": [],
        "values": [],
        "ties": True,
        "kept": True,
        "generator": True,
        "run_eagerly": RUN_EAGERLY.get(name, {}),
    }
