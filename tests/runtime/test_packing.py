"""Documents packed into rows: every token once, documents apart, positions restored."""

import pytest
import torch
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import PackedDocuments, cu_seq_lens, document_mask
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
