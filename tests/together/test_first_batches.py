"""Ranks that train on the same batch are told, and ranks that share one are not."""

import logging

import torch
from log_records import Records
from plugin_runs import RUNS, boosted, step
from ranked import on_ranks

from booster_testing.models import tiny_llama


@on_ranks(2)
def test_ranks_that_work_on_one_batch_together_are_not_told():
    records = Records()
    logging.getLogger("booster").addHandler(records)
    try:
        run = boosted(RUNS["hybrid-tp"], tiny_llama())
        for _ in range(4):
            ids = torch.randint(16, (2, 8))
            step(*run, {"input_ids": ids, "labels": ids})
    finally:
        logging.getLogger("booster").removeHandler(records)
    assert records.texts == []
