"""Lazy models have, bit for bit, the values that they would have without the context, and so has the generator."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, materialize
from booster_runtime.lazy.log import Entry
from booster_runtime.lazy.replay import Replay
from booster_testing.models import TinyMixedBag


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, non-persistent and tied ones too."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def assert_same_state(lazy: nn.Module, eager: nn.Module) -> None:
    actual, expected = state_of(lazy), state_of(eager)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        other = actual[name]
        assert type(other) is type(tensor), name
        assert (other.dtype, other.stride(), other.requires_grad) == (
            tensor.dtype,
            tensor.stride(),
            tensor.requires_grad,
        )
        torch.testing.assert_close(other.detach(), tensor.detach(), rtol=0, atol=0, equal_nan=True, msg=name)
    ties = [[name for name in expected if expected[name] is tensor] for tensor in expected.values()]
    assert ties == [[name for name in actual if actual[name] is tensor] for tensor in actual.values()]


def eager_and_lazy(build: Callable[[], Any]) -> tuple[Any, Any, LazyInitContext, Tensor]:
    """Return what is built without the context and in it, the context, and the generator's state after the former."""
    torch.manual_seed(3)
    eager = build()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with LazyInitContext() as context:
        lazy = build()
    return eager, lazy, context, state


def assert_lazy_equals_eager(build: Callable[[], nn.Module]) -> LazyInitContext:
    eager, lazy, context, expected_state = eager_and_lazy(build)
    assert is_lazy(lazy)
    parameters = list(lazy.parameters())
    materialize(lazy)
    assert not is_lazy(lazy)
    assert all(now is before for now, before in zip(lazy.parameters(), parameters, strict=True))
    assert_same_state(lazy, eager)
    assert torch.equal(torch.get_rng_state(), expected_state)
    return context


def runs_itself() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        size = features(torch.zeros(1, 3, 8, 8)).flatten(1).shape[1]
    return nn.Sequential(features, nn.Linear(size, 2))


def values_decide_shapes() -> nn.Module:
    mask = torch.rand(40) > 0.5
    return nn.ParameterDict({"picked": nn.Parameter(torch.randn(40)[mask]), "other": nn.Parameter(torch.rand(3))})


def draws_on_real() -> nn.Module:
    model = nn.Linear(3, 3)
    constant = torch.arange(9.0).view(3, 3)
    constant.add_(torch.rand(3, 3))
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    table.normal_()
    model.register_buffer("table", table)
    model.register_buffer("constant", constant)
    model.register_buffer("after", torch.rand(2))
    return model


def converts() -> nn.Module:
    model = TinyMixedBag().to(torch.bfloat16)
    model.norm.to(torch.float32)
    model.requires_grad_(requires_grad=False)
    model.head.half()
    return model


def copies() -> nn.Module:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    return nn.ModuleList([copy.deepcopy(model), model, copy.deepcopy(model)])


def shares_memory() -> nn.Module:
    model = nn.Module()
    whole = torch.randn(6, 4)
    model.register_buffer("whole", whole)
    model.register_buffer("rows", whole[2:4])
    model.register_buffer("column", whole[:, 1])
    model.top = nn.Parameter(torch.randn(8, 3).t())
    return model


def in_double() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:.*nested_tensor:UserWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(5, 3),
        lambda: nn.Conv2d(3, 4, 3, padding=1),
        lambda: nn.BatchNorm2d(4),
        lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
        lambda: nn.Bilinear(2, 3, 4),
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 8), 2),
        TinyMixedBag,
        runs_itself,
        converts,
        copies,
        shares_memory,
        in_double,
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
        pytest.param(
            lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
        ),
    ],
)
def test_modules_equal_eager_ones(build: Callable[[], nn.Module]) -> None:
    assert_lazy_equals_eager(build)


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.trunc_normal_,
        lambda tensor: nn.init.trunc_normal_(tensor, mean=0.5, std=1.5, a=-1, b=1),
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
        lambda tensor: nn.init.constant_(tensor, 3.0),
        lambda tensor: nn.init.sparse_(tensor, 0.3),
        lambda tensor: nn.init.trunc_normal_(tensor[2:5]),
        lambda tensor: nn.init.dirac_(tensor.data.view(9, 7, 1)),
        lambda tensor: tensor.data.bernoulli_(0.3),
        lambda tensor: tensor.data.exponential_(),
        lambda tensor: tensor.data.copy_(torch.poisson(torch.rand(9, 7) * 5)),
        lambda tensor: tensor.data.copy_(nn.functional.dropout(tensor.data)),
    ],
)
def test_initialisers_equal_eager_ones(initialise: Callable[[Tensor], object]) -> None:
    def build() -> nn.Module:
        model = nn.Linear(7, 9)
        initialise(model.weight)
        nn.init.normal_(model.bias)
        return model

    assert_lazy_equals_eager(build)


@pytest.mark.parametrize(
    ("build", "run"),
    [(values_decide_shapes, {"aten::index": 1}), (draws_on_real, {"aten::add_": 1, "aten::normal_": 1})],
)
def test_what_cannot_be_recorded_is_run_and_reported(build: Callable[[], nn.Module], run: dict[str, int]) -> None:
    assert assert_lazy_equals_eager(build).run_eagerly == run


def test_two_models_of_one_context_are_materialized_one_by_one() -> None:
    eager, lazy, _, expected_state = eager_and_lazy(lambda: [nn.Linear(4, 4), TinyMixedBag()])
    materialize(lazy[1])
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert is_lazy(lazy[0])
    materialize(lazy[0])
    for one, other in zip(lazy, eager, strict=True):
        assert_same_state(one, other)


def test_a_generator_seeded_after_the_context_is_left_alone() -> None:
    with LazyInitContext():
        model = nn.Linear(4, 4)
    torch.manual_seed(9)
    expected = torch.get_rng_state()
    materialize(model)
    assert torch.equal(torch.get_rng_state(), expected)


def test_construction_may_go_on_after_the_context() -> None:
    def finish(model: nn.Module) -> None:
        model.to(torch.bfloat16)
        model.head.weight = model.embedding.weight
        nn.init.normal_(model.norm.weight)
        with torch.no_grad():
            model.repeated.weight.mul_(0.5)
            model.repeated.bias.copy_(torch.arange(8.0))

    torch.manual_seed(3)
    eager = TinyMixedBag()
    finish(eager)
    _, lazy, *_ = eager_and_lazy(TinyMixedBag)
    finish(lazy)
    assert is_lazy(lazy)
    assert_same_state(materialize(lazy), eager)


def test_values_of_a_lazy_tensor_can_be_asked_for() -> None:
    def build() -> tuple[nn.Module, list[float]]:
        model = nn.Linear(4, 3)
        return model, model.weight.tolist()

    (eager, expected), (lazy, inside), *_ = eager_and_lazy(build)
    assert inside == expected
    assert lazy.weight.sum().item() == eager.weight.sum().item()
    assert lazy.weight.detach().numpy().tolist() == expected
    assert is_lazy(lazy)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Counter[Entry]:
    """Count how often each draw is done."""
    counts: Counter[Entry] = Counter()
    call = Replay._call

    def count(replay: Replay, entry: Entry, args: Any, kwargs: Any) -> Any:
        counts[entry] += entry.draw is not None
        return call(replay, entry, args, kwargs)

    monkeypatch.setattr(Replay, "_call", count)
    return counts


def test_asking_for_values_draws_each_number_once_more_at_most(played) -> None:
    with LazyInitContext() as context:
        model = nn.ModuleList()
        for _ in range(20):
            model.append(nn.Linear(4, 4))
            float(torch.rand(1))
    draws = [entry for entry in context.recorder.entries if entry.draw is not None]
    assert len(draws) == 60
    assert [played[entry] for entry in draws] == [1] * 60
    materialize(model)
    assert max(played[entry] for entry in draws) == 2


def test_a_state_that_is_restored_again_and_again_is_found_once(played) -> None:
    """Three layers start from the state after a draw that nobody wants, in one replay."""

    def build() -> nn.Module:
        torch.randn(100)
        state = torch.get_rng_state()
        layers = nn.ModuleList()
        for _ in range(3):
            layers.append(nn.Linear(3, 3))
            torch.set_rng_state(state)
        return layers

    context = assert_lazy_equals_eager(build)
    assert [played[entry] for entry in context.recorder.entries if entry.draw is not None] == [1] * 7


def test_a_replay_that_fails_midway_may_be_repeated() -> None:
    """Where an interrupted draw has left the generator is not taken for the place before."""
    eager, lazy, context, _ = eager_and_lazy(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    entry = [entry for entry in context.recorder.entries if entry.draw is not None][2]
    original = entry.function

    def fail(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise MemoryError

    entry.function = fail
    with pytest.raises(MemoryError):
        lazy[1].weight.tolist()
    entry.function = original
    materialize(lazy)
    assert_same_state(lazy, eager)


def test_plain_attributes_get_values_too() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.table = torch.randn(3)
        model.tables = {"a": [torch.randn(2), torch.randn(4)]}
        return model

    eager, lazy, *_ = eager_and_lazy(build)
    materialize(lazy)
    assert torch.equal(lazy.table, eager.table)
    assert torch.equal(lazy.tables["a"][1], eager.tables["a"][1])


def test_recurrent_layers_run_and_convert_afterwards() -> None:
    eager, lazy, *_ = eager_and_lazy(lambda: nn.GRU(3, 4))
    materialize(lazy)
    x = torch.randn(5, 1, 3)
    assert torch.equal(lazy(x)[0], eager(x)[0])
    assert torch.equal(lazy.double()(x.double())[0], eager.double()(x.double())[0])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_recordings_equal_eager_runs(seed: int) -> None:
    def in_a_fork(pool: list[Tensor]) -> None:
        with torch.random.fork_rng(devices=[]):
            pool.append(torch.randn(4, 6))

    steps: list[Callable[[list[Tensor]], object]] = [
        in_a_fork,
        lambda pool: pool.append(torch.randn(4, 6)),
        lambda pool: pool.append(torch.zeros(4, 6)),
        lambda pool: pool.append(pool[-1].t().contiguous().t()),
        lambda pool: pool.append(pool[0][1:3].clone().repeat(2, 1)),
        lambda pool: pool[-1].normal_(),
        lambda pool: pool[0][2].uniform_(),
        lambda pool: pool[-1].mul_(pool[0]),
        lambda pool: pool[0].add_(pool[-1], alpha=0.5),
        lambda pool: pool[0][:, 1:3].copy_(pool[-1][:, 2:4]),
        lambda pool: pool[-1].zero_(),
        lambda pool: pool.append(torch.where(pool[0] > 0, pool[-1], pool[0])),
        lambda pool: pool.append(pool[-1] * float(pool[0].max())),
        lambda pool: pool[-1].fill_(pool[0][0, 0]),
        lambda pool: pool.reverse(),
        lambda pool: pool.append(torch.rand_like(pool[0])),
        lambda pool: pool.append(torch.randn(4, 6, generator=torch.Generator().manual_seed(5))),
        lambda pool: torch.manual_seed(11),
        lambda pool: pool[0].__setitem__(pool[0] > 0.5, 0.5),
        lambda pool: pool[-1].__setitem__((slice(None), 0), torch.arange(4.0)),
        lambda pool: pool[-1].normal_() if (pool[0] > 1).any() else pool[-1].uniform_(),
        lambda pool: setattr(pool[-1], "data", torch.randn(4, 6) * 2),
    ]

    def build(choices: list[int]) -> nn.Module:
        model = nn.Module()
        pool = [torch.randn(4, 6), torch.ones(4, 6)]
        for choice in choices:
            steps[choice](pool)
        for number, tensor in enumerate(pool):
            model.register_buffer(f"b{number}", tensor)
        return model

    chance = random.Random(seed)
    for _ in range(25):
        choices = [chance.randrange(len(steps)) for _ in range(chance.randrange(1, 25))]
        assert_lazy_equals_eager(lambda choices=choices: build(choices))


def test_what_was_read_is_copied() -> None:
    """A script fills one buffer again and again, in ways that torch does not count, and changes it in the end."""
    buffer = np.empty((100, 100), dtype=np.float32)
    tensor = torch.from_numpy(buffer)
    with LazyInitContext():
        model = nn.ModuleList(nn.Linear(100, 100) for _ in range(3))
        for number, layer in enumerate(model):
            buffer[:] = number + np.arange(100)
            layer.weight.data.copy_(tensor)
    tensor.data.zero_()
    materialize(model)
    for number, layer in enumerate(model):
        assert torch.equal(layer.weight, (number + torch.arange(100.0)).expand(100, 100))
