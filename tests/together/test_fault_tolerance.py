"""Replica groups around every strategy: gradients of one process, a group that comes later, equal bits."""

import torch
from matrix import matrix
from replica_ranks import Net, assert_same_bits, batch_of, hear, loss_of, run_groups, say, state_of
from safetensors.torch import load_file

INNERS = {
    "zero": {},
    "zero-2": {"stage": 2, "bucket_bytes": 1024},
    "fsdp": {},
    "gemini": {},
    "hybrid": {"zero_stage": 1},
    "hybrid-3": {"zero_stage": 3},
}
STEPS = 5


def _train(group, folder, name, options):
    """Group 1 comes when group 0 has taken two steps; its layout is then another than that of group 0."""
    if group.replica_id:
        hear(folder, f"trained-{group.rank}")
    booster = group.booster(inner=name, inner_options=options)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    took_part, norms = [], []
    while booster.plugin.step < STEPS:
        step = booster.plugin.step
        if step == 2 and not group.replica_id:
            say(folder, f"trained-{group.rank}")
            hear(folder, f"coming-{group.rank}")
        if group.replica_id and not took_part:
            booster.plugin.groups.join()
            say(folder, f"coming-{group.rank}")
            booster.plugin.groups.begin()
            step = booster.plugin.step
        index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
        booster.backward(loss_of(model, batch_of(100 * step + 10 * group.replica_id + index)), optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if booster.plugin.step > step:
            took_part.append((step, group.replica_id, index))
    state = state_of(booster, model)
    booster.save_model(model, folder / f"model{group.replica_id}.safetensors")
    return took_part, norms[-1], state


def _one_process(batches):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.cat([batch_of(100 * step + 10 * group + index) for at, group, index in sorted(batches) if at == step])
        loss_of(model, x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@matrix(["zero"], name=list(INNERS))
def test_a_group_that_comes_later_trains_as_one_process(tmp_path, name):
    found = run_groups(_train, 2, 2, tmp_path, name.partition("-")[0], INNERS[name], min_replicas=1)
    for rank in range(2):
        assert_same_bits(found[rank][2], found[2 + rank][2])
        assert found[rank][1] == found[2 + rank][1]
    batches = {each for took_part, *_ in found for each in took_part}
    assert any(group for _, group, _ in batches), "both groups took part"
    expected = _one_process(batches)
    for group in range(2):
        state = load_file(tmp_path / f"model{group}.safetensors")
        for key, values in expected.items():
            torch.testing.assert_close(state[key], values, rtol=1e-9, atol=1e-11)
