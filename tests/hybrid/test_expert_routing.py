"""Where tokens go and what comes back, for all ranks in one process."""

import pytest
import torch

from booster_hybrid.expert_parallel.exchange import make_route, sort_slots

WIDTH = 3


def routes_of(indices, num_experts):
    """Return each rank's route, given the experts that its tokens choose."""
    size, share = len(indices), num_experts // len(indices)
    sorted_ = [sort_slots(index, num_experts) for index in indices]
    return [
        make_route(
            order,
            indices[rank].shape[1],
            counts,
            torch.cat([theirs[rank * share : (rank + 1) * share] for _, theirs in sorted_]),
            size,
        )
        for rank, (order, counts) in enumerate(sorted_)
    ]


def exchanged(values, bounds, back_bounds):
    """Return what each rank receives of rows that each sends."""
    size = len(values)
    return [
        torch.cat([values[sender][bounds[sender][rank] : bounds[sender][rank + 1]] for sender in range(size)])
        for rank in range(size)
        if back_bounds[rank][-1] >= 0
    ]


def scaled(rows, numbers):
    """Return what experts make of rows: each one scales and shifts by its number."""
    return rows * (numbers + 1)[..., None] + numbers[..., None] ** 2


def computed(hidden, indices, weights, num_experts):
    """Run experts for each choice, spread over ranks, and return each rank's results."""
    routes = routes_of(indices, num_experts)
    size, share = len(indices), num_experts // len(indices)
    sent, received = [route.sent for route in routes], [route.received for route in routes]
    rows = exchanged([route.take(each) for route, each in zip(routes, hidden, strict=True)], sent, received)
    of_rows = exchanged(
        [each.reshape(-1, 1)[route.slots] for route, each in zip(routes, weights, strict=True)], sent, received
    )
    results = []
    for rank, route in enumerate(routes):
        assert rows[rank].shape[0] == route.received[-1] == len(route.local_experts)
        assert route.most_rows == torch.bincount(route.local_experts, minlength=share).max()
        results.append(scaled(rows[rank], route.local_experts + rank * share) * of_rows[rank])
    back = exchanged(results, received, sent)
    return [route.place(each, len(own)).sum(1) for route, each, own in zip(routes, back, hidden, strict=True) if size]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [(5, 5, 5, 5), (1, 7, 0, 3), (0, 0, 4, 0)])
@pytest.mark.parametrize("kind", ["any", "one rank", "dropped"])
def test_every_choice_is_computed_by_its_expert_and_comes_back_to_its_token(size, num_tokens, kind):
    num_experts, top_k = 8, 3
    generator = torch.Generator().manual_seed(size + sum(num_tokens))
    hidden, indices, weights = [], [], []
    for rank in range(size):
        tokens = num_tokens[rank]
        last = {"any": num_experts, "one rank": num_experts // size, "dropped": num_experts + 1}[kind]
        hidden.append(torch.randn(tokens, WIDTH, generator=generator))
        indices.append(torch.randint(last, (tokens, top_k), generator=generator))
        weights.append(torch.rand(tokens, top_k, generator=generator))
    found = computed(hidden, indices, weights, num_experts)
    for own, rows, index, weight in zip(found, hidden, indices, weights, strict=True):
        kept = weight * (index < num_experts)
        torch.testing.assert_close(own, (scaled(rows[:, None], index) * kept[..., None]).sum(1))
