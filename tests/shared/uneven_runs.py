"""Training with uneven numbers of batches, and what one process makes of all of them."""

import torch
from torch import nn

NUM_BATCHES = (2, 5)
"""Of each data parallel rank."""


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make():
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches_of(index):
    generator = torch.Generator().manual_seed(10 + index)
    return [torch.randn(2, 8, generator=generator) for _ in range(NUM_BATCHES[index])]


def square(outputs, _):
    return outputs.square().mean()


def train_plainly():
    model, optimizer = make()
    for number in range(max(NUM_BATCHES)):
        present = [batches_of(index)[number] for index in range(2) if number < NUM_BATCHES[index]]
        (sum(square(model(x), None) for x in present) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
