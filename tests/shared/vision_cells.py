"""Measure a cell of the table of vision-language models: a tiny model under a plugin, compared with one process.

Each cell is trained on batches with images, of text alone, and of both: under a data parallel plugin, one rank has
images then and the other has none; otherwise a part of the samples has, in a pipeline those of one microbatch.
"""

import torch
from family_cells import COLUMNS as SPLIT
from family_cells import measured, phase, watched
from vision_models import SAMPLES, build_vision, vision_batch
from zoo_cells import quiet
from zoo_results import Cell

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_tools.verification.losses import Losses, loss_of_outputs
from booster_tools.verification.run import compare_with_one_process
from booster_zero import LowLevelZeroPlugin

_DATA_PARALLEL = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": GeminiPlugin,
}
COLUMNS = (*_DATA_PARALLEL, "tp", "pp", "split_gather", "ulysses")
_ALL, _NONE = (True,) * SAMPLES, (False,) * SAMPLES
BATCHES = {
    "images": (_ALL, _ALL),
    "text": (_NONE, _NONE),
    "both": (_ALL, _NONE),
}
"""For each sample of either rank, whether it has an image; ranks that share a batch have half of each."""


def measure_vision(name, column, kinds):
    """Measure a cell on kinds of batches; also return the whole errors, if there are any."""
    found = {kind: measured(_watched_differences, name, column, kind) for kind in kinds}
    text = "\n".join(text for _, text in found.values())
    state, *others = {cell.state for cell, _ in found.values()} - {"exact"} or {"exact"}
    if others:
        return Cell(state="crash", findings=[text]), text
    reasons = {kind: cell.findings[0] for kind, (cell, _) in found.items() if cell.state == state and cell.findings}
    first = next(iter(reasons.values()), "")
    shown = first if len(reasons) == len(kinds) else f"on batches of {' and '.join(reasons)}: {first}"
    return Cell(state=state, findings=[shown] if reasons else []), text


def _watched_differences(name, column, kind):
    """Return what differs from one process; an error says in which phase it came."""
    plugin, shares = _plugin(name, column), _shares(name, column, kind)
    with quiet(), phase(watched(plugin)):
        return differences(name, plugin, shares), {}


def differences(name, plugin, shares):
    """Return what differs from one process in a step on the batches of data parallel ranks."""

    def make():
        torch.manual_seed(20)
        model = build_vision(name)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2, weight_decay=0.0)

    losses = Losses.by_criterion(loss_of_outputs)
    found = compare_with_one_process(Booster(plugin=plugin), make, losses, shares, 1, what="verify")
    return [str(each) for each in found if not each.is_explained]


def _plugin(name, column):
    if column in _DATA_PARALLEL:
        return _DATA_PARALLEL[column]()
    options = dict(SPLIT[column])
    if column == "pp":
        options["split_batch"] = _split_batch
    return HybridParallelPlugin(**options, example_batch=vision_batch(name, _ALL))


def _shares(name, column, kind):
    """Return the batch of each data parallel rank."""
    first, second = BATCHES[kind]
    if column in _DATA_PARALLEL:
        return [vision_batch(name, each) for each in (first, second)]
    return [vision_batch(name, (*first[: SAMPLES // 2], *second[: SAMPLES // 2]))]


def _split_batch(batch, count):
    """Split a batch as scripts of such models do: what is there for images, by the images of the samples."""
    size = SAMPLES // count
    tokens = batch["input_ids"]
    images = (tokens == 60).any(1).long()
    found = []
    for start in range(0, SAMPLES, size):
        rows = slice(start, start + size)
        before, here, total = int(images[:start].sum()), int(images[rows].sum()), max(int(images.sum()), 1)
        part = {}
        for key, value in batch.items():
            if value.shape[:1] == tokens.shape[:1] and value.shape[1:2] == tokens.shape[1:2]:
                part[key] = value[rows]
            elif here:
                entries = value.shape[0] // total
                part[key] = value[before * entries : (before + here) * entries]
        found.append((part, size))
    return found
