"""Logits that are split by vocabulary: as whole ones for whoever asks, and little memory for losses."""

import copy
import operator
import pickle

import pytest
import torch
import torch.distributed as dist
from hybrid_runs import RING, boosted
from matrix import matrix
from model_zoo import get_model
from ranked import on_ranks, raises_on_ranks
from torch.nn import functional

from booster_core.errors import ConfigError, MissingRanksError
from booster_core.ranks.world import current_world
from booster_hybrid import SplitLogits
from booster_hybrid.mesh import RankGroup
from booster_hybrid.split_logits import split_logits
from booster_hybrid.tensor_parallel.vocabulary import ByVocabulary

SIZES = {1: [7], 2: [4, 3], 3: [3, 2, 2]}


def make(shape=(2, 5)):
    """Return whole logits, and the same split over the ranks, both with gradients."""
    sizes = SIZES[dist.get_world_size()]
    rank = dist.get_rank()
    whole = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start = sum(sizes[:rank])
    local = whole.detach()[..., start : start + sizes[rank]].clone().requires_grad_()
    return (
        whole,
        local,
        split_logits(local * 1, ByVocabulary(sizes, RankGroup.of(None))),
        slice(start, start + sizes[rank]),
    )


def losses(logits, labels):
    flat = logits.float().view(-1, 7)
    yield functional.cross_entropy(flat, labels.view(-1))
    yield functional.cross_entropy(input=logits.reshape(-1, logits.size(-1)), target=labels.view(-1), reduction="sum")
    yield torch.nn.CrossEntropyLoss(ignore_index=2)(logits.flatten(0, 1), labels.flatten().clamp(min=0))
    shifted = logits[..., :-1, :].contiguous()
    yield functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[:, 1:].reshape(-1))
    yield functional.cross_entropy(torch.tanh(logits / 3.0)[:, -1] * 3.0, labels[:, -1])
    yield functional.cross_entropy(logits[labels > 3], labels[labels > 3], reduction="none").square().sum()
    yield functional.cross_entropy(torch.cat([logits, logits])[0], labels[0])
    weights = torch.linspace(0.5, 2.0, 7)
    yield functional.cross_entropy(flat, labels.view(-1), weights)
    yield functional.cross_entropy(flat, labels.view(-1), weight=weights, reduction="none").square().sum()
    yield functional.cross_entropy(flat * 9, labels.view(-1), label_smoothing=0.2)
    yield torch.nn.CrossEntropyLoss(label_smoothing=0.5, reduction="sum")(flat, labels.view(-1))
    yield functional.cross_entropy(logits[0, 1], labels[0, 1])
    hooked = torch.nn.Identity()
    hooked.register_full_backward_hook(lambda *_: None)
    yield functional.cross_entropy(hooked(logits).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("num_ranks")
def test_cross_entropy_in_all_its_forms_is_that_of_whole_logits(num_ranks):
    labels = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 0] = -100
    labels[0, 1], labels[1, 2] = 4, 5
    number = len(list(losses(make()[0], labels)))
    for index in range(number):
        whole, local, split, own = make()
        expected, found = list(losses(whole, labels))[index], list(losses(split, labels))[index]
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)
        (expected,), (found,) = (
            torch.autograd.grad(expected, whole, retain_graph=True),
            torch.autograd.grad(found, local, retain_graph=True),
        )
        torch.testing.assert_close(found, expected[..., own], msg=str(index))


@on_ranks(3)
def test_split_outputs_look_whole():
    whole, _, split, own = make()
    assert isinstance(split, SplitLogits)
    assert split.shape == whole.shape
    assert (split.numel(), split.dim(), len(split), split.size(-1)) == (70, 3, 2, 7)
    assert torch.equal(split.gather(), whole)
    assert torch.equal(split.local(), whole[..., own])
    assert torch.equal(split.argmax(-1), whole.argmax(-1))
    assert torch.equal(torch.argmax(split, dim=2, keepdim=True), whole.argmax(2, keepdim=True))
    assert f"{own.start}:{own.stop} of 7" in repr(split)
    assert isinstance(split.to(torch.bfloat16), SplitLogits)


@on_ranks(2)
def test_the_largest_logit_is_that_of_whole_logits_in_every_format():
    """Return logits, whole and split, whose largest are told apart by fp64 alone, are equal, or are no numbers."""
    whole = torch.zeros(4, 7, dtype=torch.float64)
    whole[0, 5], whole[0, 1] = 1.0 + 1e-12, 1.0
    whole[1, 3] = whole[1, 6] = torch.nan
    whole[2] = torch.inf
    whole[3] = -torch.inf
    sizes, rank = SIZES[dist.get_world_size()], dist.get_rank()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = whole.to(dtype)
        split = split_logits(logits.split(sizes, -1)[rank].clone(), ByVocabulary(sizes, RankGroup.of(None)))
        assert torch.equal(split.argmax(-1), logits.argmax(-1)), dtype


FACTORS = {"scalar": (), "one element": (1, 1, 1), "vector": (7,), "of each position": (5, 1)}


@matrix(1, shape=list(FACTORS))
@on_ranks(2)
def test_a_trained_factor_has_its_whole_gradient(shape):
    labels = torch.randint(7, (10,), generator=torch.Generator().manual_seed(1))
    values = torch.rand(FACTORS[shape], generator=torch.Generator().manual_seed(2))
    whole, _, split, _ = make()
    found = []
    for logits in (whole, split):
        factor = torch.nn.Parameter(values.clone())
        scaled = factor * (logits / factor) * factor
        functional.cross_entropy(scaled.flatten(0, 1), labels).backward()
        found.append(factor.grad)
    torch.testing.assert_close(found[1], found[0])


LABELS = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
WHOLE = {
    "softmax": lambda logits: logits.softmax(-1),
    "distillation": lambda logits: functional.kl_div(
        functional.log_softmax(logits / 2.0, dim=-1), torch.full((2, 5, 7), 1 / 7), reduction="batchmean"
    ),
    "gather": lambda logits: logits.gather(-1, LABELS[..., None]) - logits.logsumexp(-1, keepdim=True),
    "getitem": lambda logits: logits[..., 3],
    "getitem of a range": lambda logits: logits[:, :, :2],
    "getitem of labels": lambda logits: logits.flatten(0, 1)[torch.arange(10), LABELS.flatten()],
    "view": lambda logits: logits.view(2, 35),
    "transpose": lambda logits: functional.cross_entropy(logits.transpose(1, 2), LABELS),
    "mul": lambda logits: logits * torch.arange(7),
    "operand": lambda logits: torch.where(LABELS[..., None] > 2, torch.zeros(()), logits),
    "cross_entropy of more than two dimensions": lambda logits: functional.cross_entropy(
        logits[:, :, None].expand(2, 5, 7, 7).permute(0, 2, 3, 1), LABELS[:, :, None].expand(2, 5, 7).permute(0, 2, 1)
    ),
    "cross_entropy of probabilities": lambda logits: functional.cross_entropy(
        logits.view(-1, 7), torch.full((10, 7), 1 / 7)
    ),
    "cross_entropy with weights of smoothed labels": lambda logits: functional.cross_entropy(
        logits.view(-1, 7), LABELS.flatten(), torch.arange(1.0, 8), label_smoothing=0.1
    ),
    "cat along the vocabulary": lambda logits: torch.cat([logits, torch.ones(2, 5, 1)], -1),
    "after an update in place": lambda logits: logits.exp() + logits.mul_(2).exp(),
    "iterated": lambda logits: torch.stack([row.exp() for row in logits]),
    "a length of the vocabulary": lambda logits: logits[0, 0].exp() * len(logits[0, 0]),
    "nested": lambda logits: torch.block_diag(*[logits[0], logits[1]]),
    "a module": torch.nn.LayerNorm(7),
    "both ways": lambda logits: (
        functional.cross_entropy(logits.view(-1, 7), LABELS.flatten()) + logits.logsumexp(-1).sum()
    ),
}


@pytest.mark.parametrize("name", WHOLE)
@on_ranks(3)
def test_operations_on_whole_logits_have_gradients(name):
    function = WHOLE[name]
    whole, local, split, own = make()
    expected, found = function(whole * 1), function(split)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    (expected,) = torch.autograd.grad((expected * weights).sum(), whole)
    (found,) = torch.autograd.grad((found * weights).sum(), local)
    torch.testing.assert_close(found, expected[..., own])


@on_ranks(2)
def test_split_state_is_saved_whole():
    whole, _, split, _ = make()
    with torch.no_grad():
        assert split.tolist() == whole.tolist()
        assert (split.detach().numpy() == whole.detach().numpy()).all()
        assert torch.equal(copy.deepcopy(split.detach()), whole)
        assert torch.equal(pickle.loads(pickle.dumps(split.detach())), whole)
        assert torch.equal(split.multinomial(1) if split.dim() == 1 else split[0].softmax(-1), whole[0].softmax(-1))
    assert {split: 1}[split] == 1
    assert type(LABELS.to(split)) is type(LABELS.type_as(split)) is torch.Tensor
    assert split.new_zeros(3).tolist() == [0.0] * 3


IN_PLACE = {
    "__setitem__": lambda logits: logits.__setitem__((..., 3), 0.0),
    "masked_fill_": lambda logits: logits.masked_fill_(LABELS[..., None] > 2, 0.0),
    "mul_": lambda logits: logits.mul_(torch.arange(7)),
    "mul_ by an operator": lambda logits: operator.imul(logits, torch.arange(7)),
    "relu": lambda logits: functional.relu(logits, inplace=True),
    "exp": lambda logits: torch.exp(torch.ones(2, 5, 7), out=logits),
    "data": lambda logits: setattr(logits, "data", torch.ones(2, 5, 7)),
}


@pytest.mark.parametrize("name", IN_PLACE)
@on_ranks(2)
def test_in_place_changes_of_split_outputs_raise(name):
    called = name.partition(" ")[0]
    message = rf"`.*{called}.*` would write into \d:\d of 7 logits.*`logits.gather\(\)`.*`parallel_output=False`"
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        IN_PLACE[name](make()[2])


@raises_on_ranks(
    ConfigError, r"A view of all logits, of which this rank has \d:\d of 7 logits, was changed in place", 2
)
def test_writing_to_a_view_of_gathered_logits_raises():
    with torch.no_grad():
        logits = make()[2]
        logits[..., 3].fill_(0.0)
        logits.view(-1, 7)


@on_ranks(2)
def test_a_call_on_one_rank_alone_raises_instead_of_meeting_another_collective():
    current_world().timeout_seconds = 1.0
    split = make()[2]
    if dist.get_rank() == 0:
        with pytest.raises(MissingRanksError) as caught:
            split.softmax(-1)
        message = str(caught.value)
        assert message.startswith("`gather of split logits` waited 1 s for rank 1 of 2, which did not call it.")
        assert message.endswith(
            "`softmax` needs whole logits, of which each of these ranks has a part. Let all of them call it, look at "
            "`logits.local()` on one, or pass `parallel_output=False`."
        )


@pytest.mark.parametrize("label", [7, -2])
@on_ranks(3)
def test_labels_outside_of_the_vocabulary_raise_on_every_rank(label):
    labels = torch.zeros(10, dtype=torch.int64)
    labels[3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds: there are 7"):
        functional.cross_entropy(make()[2].view(-1, 7), labels, ignore_index=-1)


def train_on(options, tokens, labels):
    _, model, _ = boosted(get_model("transformers/llama").seeded(), **options)
    model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels]))


SPLITS = {
    "vocabulary": {"tp_size": 2, "parallel_output": True},
    "sequence": {**RING, "parallel_output": True},
}


@pytest.mark.parametrize("what", SPLITS)
@raises_on_ranks(IndexError, "Target 64 is out of bounds", 2)
def test_wrong_labels_of_one_part_of_a_sequence_raise_on_every_rank(what):
    train_on(SPLITS[what], [1, 2, 3], [1, 64, 2])


@raises_on_ranks(IndexError, "Token 64 is out of bounds: there are 64", 2)
def test_tokens_outside_of_the_vocabulary_raise_on_every_rank():
    train_on({"tp_size": 2}, [1, 64], [1, 2])
