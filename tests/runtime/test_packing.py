"""Documents packed into rows: every token once, documents apart, positions restored."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_runtime import FirstFitDocuments, PackedDocuments, cu_seq_lens, document_mask
from booster_runtime.data.packing import first_fit
from booster_runtime.data.shard import split_dataloader
from booster_testing.models import tiny_llama

DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19]]


class Documents:
    """Documents that tell their position, or don't."""

    def __init__(self, documents=DOCUMENTS):
        self.documents, self.at = documents, 0

    def __iter__(self):
        for number in range(self.at, len(self.documents)):
            self.at = number + 1
            yield {"input_ids": torch.tensor(self.documents[number])}
        self.at = 0


class Telling(Documents):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def rows_of(packed):
    return [{name: tensor.tolist() for name, tensor in row.items()} for row in packed]


def test_rows_have_all_tokens_and_positions_start_with_documents():
    assert rows_of(PackedDocuments(DOCUMENTS, 4)) == [
        {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 2, 0], "labels": [-100, 2, 3, -100]},
        {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 2, 3], "labels": [-100, 6, 7, 8]},
        {"input_ids": [9, 10, 11, 12], "position_ids": [0, 1, 2, 3], "labels": [-100, 10, 11, 12]},
        {"input_ids": [13, 14, 15, 16], "position_ids": [0, 0, 1, 0], "labels": [-100, -100, 15, -100]},
    ]
    twice = PackedDocuments(DOCUMENTS, 5)
    next(iter(twice))  # a pass that is left early leaves nothing
    assert rows_of(twice) == rows_of(twice)


@pytest.mark.parametrize("kind", [Documents, Telling])
@pytest.mark.parametrize("num_rows", range(4))
def test_a_position_inside_of_a_document_is_restored(kind, num_rows):
    expected = rows_of(PackedDocuments(kind(), 4))
    first = PackedDocuments(kind(), 4)
    iterator = iter(first)
    for _ in range(num_rows):
        next(iterator)
    second = PackedDocuments(kind(), 4)
    second.load_state_dict(first.state_dict())
    second.load_state_dict(second.state_dict())
    assert rows_of(second) == expected[num_rows:]
    assert rows_of(second) == expected


def test_documents_of_a_row_do_not_see_each_other():
    torch.manual_seed(0)
    model = tiny_llama().eval()
    (row,) = PackedDocuments([list(range(3, 8)), list(range(20, 27))], 12)
    batch = {name: tensor[None] for name, tensor in row.items()}
    outputs = model(**batch)
    apart = [model(input_ids=torch.arange(first, last)[None]).logits for first, last in ((3, 8), (20, 27))]
    torch.testing.assert_close(outputs.logits, torch.cat(apart, dim=1))
    losses = [model(input_ids=ids, labels=ids).loss for ids in (torch.arange(3, 8)[None], torch.arange(20, 27)[None])]
    torch.testing.assert_close(outputs.loss, (losses[0] * 4 + losses[1] * 6) / 10)


def test_boost_takes_them():
    loader = DataLoader(PackedDocuments(Telling(), 4), batch_size=2)
    booster = Booster()
    _, _, _, loader, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
    first = next(iter(loader))["input_ids"]
    state = loader.state_dict()
    _, _, _, other, _ = Booster().boost(
        torch.nn.Linear(1, 1), dataloader=DataLoader(PackedDocuments(Telling(), 4), batch_size=2)
    )
    other.load_state_dict(state)
    rest = [row for batch in other for row in batch["input_ids"].tolist()]
    assert first.tolist() + rest == [row["input_ids"] for row in rows_of(PackedDocuments(DOCUMENTS, 4))]


def test_documents_may_have_labels_of_their_own():
    documents = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, {"input_ids": [4, 5, 6], "labels": [4, 5, -100]}]
    first, second = rows_of(PackedDocuments(documents, 3))
    assert (first["labels"], second["labels"]) == ([-100, -100, 3], [-100, 5, -100])
    with pytest.raises(ConfigError, match="Document 0 has 2 tokens and 1 labels"):
        list(PackedDocuments([{"input_ids": [1, 2], "labels": [1]}], 2))


def test_a_row_has_tokens():
    with pytest.raises(ConfigError, match="length=0"):
        PackedDocuments(DOCUMENTS, 0)


def fitted(documents=DOCUMENTS, length=9, **settings):
    return FirstFitDocuments(documents, length, **{"window": 2, "pad_token_id": 99, **settings})


def many(count=150, longest=60):
    """Documents of which most are short; no token comes twice."""
    drawn = random.Random(4)
    lengths = [1 + int(longest * drawn.random() ** 3) for _ in range(count)]
    return [list(range(1000 * number, 1000 * number + length)) for number, length in enumerate(lengths)]


def costs_of(rows):
    """Return the sums of squares of the lengths of rows' documents."""
    return [int(cu_seq_lens(row["position_ids"])["cu_seq_lens_q"].diff().square().sum()) for row in rows]


def test_the_first_row_with_room_takes_the_longest_that_is_left():
    lengths = [3, 9, 1, 2, 4]
    assert first_fit(lengths, 9) == [[0, 3, 4], [1], [2]]
    assert first_fit([], 9) == []
    drawn = [len(each) for each in many()]
    rows = first_fit(drawn, 60)
    open_rows = []  # the definition, by looking at every row
    for index in sorted(range(len(drawn)), key=lambda index: -drawn[index]):
        home = next((row for row in open_rows if sum(drawn[each] for each in row) + drawn[index] <= 60), None)
        open_rows.append([index]) if home is None else home.append(index)
    assert rows == sorted(sorted(row) for row in open_rows)


def test_rows_by_first_fit_have_whole_documents_and_padding():
    assert sorted(rows_of(fitted()), key=str) == [
        {
            "input_ids": [1, 2, 3, 14, 15, 16, 17, 18, 19],
            "position_ids": [0, 1, 2, 0, 1, 0, 1, 2, 3],
            "labels": [-100, 2, 3, -100, 15, -100, 17, 18, 19],
        },
        {"input_ids": [13] + [99] * 8, "position_ids": [0, *range(8)], "labels": [-100] * 9},
        {"input_ids": list(range(4, 13)), "position_ids": list(range(9)), "labels": [-100, *range(5, 13)]},
    ]


@pytest.mark.parametrize(("window", "filled"), [(4, 0.85), (32, 0.97)])
def test_first_fit_hands_out_every_token_once_and_cuts_what_is_longer_than_a_row(window, filled):
    documents = [*many(), list(range(500_000, 500_150))]
    rows = rows_of(FirstFitDocuments(documents, 60, window=window, step_rows=4, pad_token_id=-1))
    found = sorted(token for row in rows for token in row["input_ids"] if token >= 0)
    assert found == sorted(token for document in documents for token in document)
    for row in rows:
        starts = [number for number, position in enumerate(row["position_ids"]) if position == 0]
        pieces = [row["input_ids"][start:stop] for start, stop in zip(starts, [*starts[1:], 60], strict=True)]
        assert all(piece in documents or piece[0] >= 500_000 or piece[0] == -1 for piece in pieces)
    assert len(found) / (60 * len(rows)) > filled


def test_ranks_wait_little_for_each_other_in_a_step():
    def waits(documents):
        """Return what the costlier row of a step of two ranks costs, of the mean, over all steps."""
        loaders = [
            split_dataloader(DataLoader(documents, batch_size=None), rank=rank, world_size=2, seed=3)
            for rank in range(2)
        ]
        costs = list(zip(*map(costs_of, loaders), strict=True))
        return sum(map(max, costs)) / sum(sum(each) / 2 for each in costs)

    documents = many(600)
    balanced = waits(FirstFitDocuments(documents, 60, window=32, step_rows=2))
    assert balanced < 1.1 < waits(FirstFitDocuments(documents, 60, window=32))
    assert balanced < waits(PackedDocuments(documents, 60))


@pytest.mark.parametrize("kind", [Documents, Telling])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 9])
def test_a_position_inside_of_a_window_is_restored(kind, num_rows):
    def made():
        return FirstFitDocuments(kind(many(60)), 60, window=4, step_rows=2)

    expected = rows_of(made())
    first, second = made(), made()
    iterator = iter(first)
    for _ in range(num_rows):
        next(iterator)
    second.load_state_dict(first.state_dict())
    second.load_state_dict(second.state_dict())
    assert rows_of(second) == expected[num_rows:]
    assert rows_of(second) == expected
    first.set_epoch(1)
    assert rows_of(first) != expected, "steps come in another order"
    assert sorted(map(str, rows_of(first))) == sorted(map(str, expected))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2)])
def test_any_number_of_ranks_goes_on_at_any_row(before, after):
    def ranks(number):
        return [
            split_dataloader(
                DataLoader(FirstFitDocuments(many(60), 60, window=4), batch_size=1),
                rank=rank,
                world_size=number,
                seed=3,
            )
            for rank in range(number)
        ]

    seen = []
    saving, loading = ranks(before), ranks(after)
    for loader in saving:
        iterator = iter(loader)
        seen += [next(iterator)["input_ids"].tolist() for _ in range(3)]
    for loader in loading:
        loader.load_state_dict(saving[0].state_dict())
        seen += [row for batch in loader for row in loader.without_padding(batch["input_ids"])[None].tolist() if row]
    rows = rows_of(FirstFitDocuments(many(60), 60, window=4))
    assert sorted(seen) == sorted([row["input_ids"]] for row in rows)


def test_rows_packed_in_another_way_are_refused():
    state = fitted().state_dict()
    with pytest.raises(CheckpointError, match=r"'window': 2.*'window': 4.*Pack them as"):
        fitted(window=4).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"`window=2` is no multiple of `step_rows=3`"):
        fitted(step_rows=3)


def test_masks_and_bounds_of_documents():
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    sees = document_mask(positions)
    assert sees.shape == (2, 1, 4, 4)
    assert sees[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    bounds = cu_seq_lens(positions)
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 8]
    assert (bounds["cu_seq_lens_q"].dtype, bounds["max_length_k"]) == (torch.int32, 3)
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    (theirs, _), (longest, _) = prepare_fa_kwargs_from_position_ids(positions)
    assert (theirs.tolist(), int(longest)) == (bounds["cu_seq_lens_q"].tolist(), 3)
