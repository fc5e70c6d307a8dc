"""Steps of several micro-batches over two epochs, in one process."""

import torch

NUM_BATCHES, STEPS, PER_BATCH = 5, 2, 4


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_data():
    x = torch.randn(NUM_BATCHES * PER_BATCH, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(dim=1, keepdim=True).sin()


def mse(outputs, targets):
    return torch.nn.functional.mse_loss(outputs, targets)


def train_plainly():
    """Return parameters after two epochs whose last step has one batch, where others have two."""
    model, (x, y) = make_model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        for start in range(0, len(x), STEPS * PER_BATCH):
            part = slice(start, start + STEPS * PER_BATCH)
            mse(model(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}
