"""The trainings of ``tests/together/scripts/outsiders`` in plain PyTorch, in one process, on all ranks' batches.

Each function takes the number of data parallel ranks and the script's output path, and returns state dicts by
subfolder of that. A batch is the list of what ranks get of it: as DistributedDataParallel does, a step follows the
mean of their losses, which is the loss of the global batch where ranks' means are over equally many terms.
"""

import copy

import torch
from named_plugins import make_model, samples
from torch import nn
from torch.nn import functional
from torch.utils.data import WeightedRandomSampler


def deal(tensors, replicas, batch_size=2):
    """Return the batches of tensors with one entry per sample, each as a list of what ranks get."""
    size = batch_size * replicas
    for start in range(0, len(tensors[0]), size):
        chunk = [tensor[start : start + size] for tensor in tensors]
        yield [tuple(tensor[rank::replicas] for tensor in chunk) for rank in range(replicas)]


def mean(losses):
    losses = list(losses)
    return sum(losses) / len(losses)


def classifier(num_classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, num_classes))


def labelled(count, num_classes=3):
    return torch.randn(count, 8), torch.randint(num_classes, (count,))


def train(model, optimizer, batches, criterion=functional.cross_entropy):
    for shares in batches:
        mean(criterion(model(x), y) for x, y in shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"": model.state_dict()}


def simplest(replicas, out):
    del out
    model = classifier()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), deal(labelled(12), replicas))


def plain_backward(replicas, out):
    del out
    model = classifier()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), deal(labelled(12), replicas))


def gan(replicas, out):
    del out
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999)) for model in (generator, discriminator)
    ]

    def loss(x, target):
        return functional.binary_cross_entropy_with_logits(discriminator(x), torch.full((len(x), 1), target))

    for shares in deal([torch.randn(12, 8), torch.randn(12, 3)], replicas):
        discriminator.zero_grad()
        mean(loss(real, 1.0) for real, _ in shares).backward()
        mean(loss(generator(noise).detach(), 0.0) for _, noise in shares).backward()
        optimizers[1].step()
        generator.zero_grad()
        mean(loss(generator(noise), 1.0) for _, noise in shares).backward()
        optimizers[0].step()
    return {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}


def distillation(replicas, out):
    del out
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    inputs = torch.randn(12, 8)

    def criterion(logits, x):
        return functional.kl_div(logits.log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")

    return train(student, torch.optim.AdamW(student.parameters(), lr=0.01), deal([inputs] * 2, replicas), criterion)


def weighted_sampler(replicas, out):
    del out
    model = classifier()
    x, y = labelled(24)
    weights = torch.where(y == 0, 3.0, 1.0)
    order = list(WeightedRandomSampler(weights, 12, generator=torch.Generator().manual_seed(7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, optimizer, deal([x[order], y[order]], replicas))


def own_batch_sampler(replicas, out):
    del out
    model = classifier()
    x, y = labelled(24)
    numbers = [0, 7, 1, 6, 2, 5, 3, 4]
    batches = [(x[3 * number : 3 * number + 3], y[3 * number : 3 * number + 3]) for number in numbers]
    dealt = [batches[start : start + replicas] for start in range(0, len(batches), replicas)]
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), dealt)


def evaluation(replicas, out, metrics=None):
    del out
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    (x, y), (test_x, test_y) = labelled(12), labelled(8)
    for _ in range(2):
        train(model, optimizer, deal([x, y], replicas))
        if metrics is not None:
            metrics.append(functional.cross_entropy(model(test_x), test_y).item())
    return {"": model.state_dict()}


def clip_by_torch(replicas, out):
    del out
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for shares in deal(labelled(12), replicas):
        mean(functional.cross_entropy(model(x), y) for x, y in shares).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {"": model.state_dict()}


def ema_by_deepcopy(replicas, out):
    del out
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = copy.deepcopy(model)
    for shares in deal(labelled(12), replicas):
        train(model, optimizer, [shares])
        with torch.no_grad():
            for averaged, parameter in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(parameter, 0.1)
    return {"": average.state_dict()}


def torch_save(replicas, out):
    del out
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = labelled(12)
    train(model, optimizer, deal(data, replicas))  # the second epoch is undone by the load
    return train(model, optimizer, deal(data, replicas))


def accumulate(replicas, out):
    del out
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, shares in enumerate(deal(labelled(32), replicas), start=1):
        (mean(functional.cross_entropy(model(x), y) for x, y in shares) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {"": model.state_dict()}


def schedule_by_epoch(replicas, out):
    del out
    model = classifier()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    data = labelled(12)
    for epoch in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.5**epoch
        train(model, optimizer, deal(data, replicas))
    return {"": model.state_dict()}


def class_weights(replicas, out):
    del out
    model = classifier(4)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batches = deal(labelled(24, 4), replicas, 4)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, criterion)


def iterable_dataset(replicas, out):
    del out
    model = classifier()
    generator = torch.Generator().manual_seed(5)
    x = torch.stack([torch.randn(8, generator=generator) for _ in range(12)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer, deal([x, torch.arange(12) % 3], replicas))
    return {"": model.state_dict()}


def unseeded(replicas, out):
    model = classifier()
    model.load_state_dict(torch.load(f"{out}-initial.pt"))
    data = torch.arange(96.0).view(12, 8).sin(), torch.arange(12) % 3
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), deal(data, replicas))


def resumed(replicas, out):
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = labelled(12)
    checkpoint = torch.load(f"{out}-before.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return train(model, optimizer, deal(data, replicas))


def save_for_resumed(out):
    """Save what the script resumes from."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, deal(labelled(8), 1))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}-before.pt")


def two_losses(replicas, out):
    del out
    model = classifier()

    def criterion(logits, y):
        return functional.cross_entropy(logits, y) + 1e-2 * logits.square().mean()

    batches = deal(labelled(12), replicas)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, criterion)


def lightning_module(replicas, out):
    return {"": {f"net.{name}": values for name, values in simplest(replicas, out)[""].items()}}


def language_model(tokens, replicas, make_optimizer, collate):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for shares in deal([tokens], replicas):
        mean(model(**collate(each)).loss for (each,) in shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"": model.state_dict()}


def colossal_pipeline(replicas, out):
    del out
    tokens = samples()[: 6 * replicas]  # three steps

    def make_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    return language_model(tokens, replicas, make_optimizer, lambda each: {"input_ids": each, "labels": each})


def hf_collator(replicas, out):
    del out

    def collate(tokens):
        padding = torch.zeros(len(tokens), 2, dtype=torch.long)
        return {
            "input_ids": torch.cat([padding, tokens], 1),
            "attention_mask": torch.cat([padding, torch.ones_like(tokens)], 1),
            "labels": torch.cat([padding - 100, tokens], 1),
        }

    def make_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return language_model(samples(), replicas, make_optimizer, collate)
