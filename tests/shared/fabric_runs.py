"""Training runs of a Lightning Fabric loop, under Fabric's own strategy for one device and under a Booster."""

import torch
from isolated_libraries import import_quietly, use_isolated_libraries
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader

from booster_core import Booster

NUM_SAMPLES, GLOBAL_BATCH = 24, 4


def make_fabric(plugin, **options):
    """Return a Fabric: its own for one device without a plugin."""
    use_isolated_libraries()
    import_quietly(["lightning_fabric"])
    from lightning_fabric import Fabric

    if plugin is None:
        return Fabric(accelerator="cpu", devices=1, **options)
    import_quietly(["booster_tools.integrations.fabric"])
    from booster_tools.integrations.fabric import BoosterStrategy

    return Fabric(accelerator="cpu", strategy=BoosterStrategy(Booster(plugin=plugin_named(plugin))), **options)


def make_model():
    """Return the same model on every rank."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))


def samples():
    """Return pairs of inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(NUM_SAMPLES)]


def train(plugin, ranks, saved=None, resumed=None, stop_after=None):
    """Train as Fabric's users write it: two micro-batches a step, clipped, scheduled; return losses and parameters."""
    fabric = make_fabric(plugin)
    fabric.launch()
    with fabric.init_module():
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=GLOBAL_BATCH // ranks))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if resumed is not None:
        remainder = fabric.load(resumed, state)
        assert remainder == {}
    losses, norms = [], []
    for index, (inputs, targets) in enumerate(loader):
        if index < 2 * state["step"]:
            continue
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = (model(inputs) - targets).square().mean()
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss).item())
        if index % 2:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.3).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
        if state["step"] == stop_after:
            break
    if saved is not None:
        fabric.save(saved, state)
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).flatten().tolist() == list(range(ranks))
    assert fabric.broadcast(fabric.global_rank, src=ranks - 1) == ranks - 1
    return losses, norms, scheduler.get_last_lr()


def misuse(plugin):
    """Return the messages of calls that a Booster refuses."""
    found = []

    def tried(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the user would see
            found.append((type(error).__name__, str(error)))
        else:
            found.append(None)

    tried(make_fabric, plugin, precision="bf16-mixed")
    fabric = make_fabric(plugin)
    fabric.launch()
    first, second = make_model(), make_model()
    tried(fabric.setup, first, *(torch.optim.SGD(first.parameters(), lr=0.1) for _ in range(2)))
    tried(fabric.setup_optimizers, torch.optim.SGD(first.parameters(), lr=0.1))
    first, _ = fabric.setup(first, torch.optim.SGD(first.parameters(), lr=0.1))
    second, _ = fabric.setup(second, torch.optim.SGD(second.parameters(), lr=0.1))
    tried(fabric.backward, second(torch.ones(2, 6)).sum())
    fabric.backward(second(torch.ones(2, 6)).sum(), model=second)
    tried(fabric.save, "unused", {"step": 1})
    tried(fabric.save, "unused", {"model": first, "other": second})
    return found
