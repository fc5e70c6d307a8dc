"""State and step on the host or its disk: the same bits as without, less memory, nothing lost when the disk is full."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mapped_memory import mapped_bytes
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, OffloadError
from booster_testing import close_ranks, expect_on_ranks, peak_memory, run_on_ranks
from booster_zero import LowLevelZeroPlugin

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
    "other": lambda params: CountsSteps(params),  # noqa: PLW0108 - defined below
}


class CountsSteps(torch.optim.Optimizer):
    """An optimizer of somebody's own, which counts steps for a group: it can't be stepped bucket by bucket."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.5)
                parameter.sub_(state["mean"], alpha=group["lr"] / group["steps"])


def make(width=16, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def boost(options, name="fused", precision="fp32", **sizes):
    booster = Booster("cpu", precision, LowLevelZeroPlugin(**{"bucket_bytes": 2048, **options}))
    net = make(**sizes)
    model, optimizer, *_ = booster.boost(net, OPTIMIZERS[name](list(net.parameters())))
    return booster, model, optimizer


def train(booster, model, optimizer, steps, first=0):
    width = model.unwrap()[0].in_features
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, width, generator=generator)
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def disk(folder):
    return {"offload": "disk", "offload_dir": folder}


def trained(options, name, precision, steps=5):
    booster, model, optimizer = boost(options, name, precision)
    train(booster, model, optimizer, steps)
    return {key: value.clone() for key, value in model.state_dict().items()}


@matrix(1, where=["cpu", "disk"], precision=["fp32", "bf16", "fp16"])
def test_offload_changes_no_bit_under_any_precision(where, precision, tmp_path):
    options = disk(str(tmp_path)) if where == "disk" else {"offload": "cpu"}
    plain, offloaded = (run_on_ranks(trained, 2, each, "fused", precision)[0] for each in ({}, options))
    assert all(torch.equal(plain[name], tensor) for name, tensor in offloaded.items())


@matrix(["1-sgd"], stage=[1, 2], name=list(OPTIMIZERS))
def test_disk_offload_changes_no_bit_of_any_optimizer(name, stage, tmp_path):
    plain, offloaded = (
        run_on_ranks(trained, 2, {"stage": stage, **each}, name, "bf16")[0] for each in ({}, disk(str(tmp_path)))
    )
    assert all(torch.equal(plain[key], tensor) for key, tensor in offloaded.items())
    assert list(tmp_path.iterdir()) == [], "files have no name"


def where_state_is(options, name, precision):
    booster, model, optimizer = boost(options, name, precision, width=64)
    train(booster, model, optimizer, 2)
    elementwise = [
        value
        for piece in optimizer.layout.pieces().values()
        for key, value in optimizer.optim.state[piece.values].items()
        if isinstance(value, torch.Tensor) and key != "step" and value.shape == piece.values.shape
    ]
    masters = [bucket.values for bucket in optimizer.layout.buckets if bucket.values.numel()]
    masters = masters if precision == "bf16" else []
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*elementwise, *masters))
    return mapped_bytes(options["offload_dir"]), needed, [_is_in_file(t, options) for t in (*elementwise, *masters)]


def _is_in_file(tensor, options):
    prefix = f"{Path(options['offload_dir']).resolve()}/booster-"
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return prefix in line
    return False


@matrix(1, name=["adamw", "muon", "other"], precision=["fp32", "bf16"])
def test_elementwise_state_and_masters_are_in_files(name, precision, tmp_path):
    for mapped, needed, in_file in run_on_ranks(where_state_is, 2, disk(str(tmp_path)), name, precision):
        assert in_file
        assert all(in_file)
        assert needed <= mapped < 1.2 * needed + 2**16, "slices are padded, and files are whole pages"


def anonymous_bytes(options):
    """Return what training keeps, in bytes of this process' own."""
    with peak_memory(maps_files=True) as used:
        booster, model, optimizer = boost({"bucket_bytes": 2**20, **options}, precision="bf16", width=512, depth=16)
        train(booster, model, optimizer, 2)
    return used.kept_bytes


def test_own_memory_falls_by_the_bytes_of_state_and_masters(tmp_path):
    numel = 16 * (512 * 512 + 512)
    results = []
    for options in ({}, disk(str(tmp_path))):
        close_ranks()  # what malloc keeps of earlier tests would serve one and not the other
        results.append(run_on_ranks(anonymous_bytes, 2, options))
    expected = 3 * 4 * numel // 2  # two averages and a master of each element, over two ranks
    for kept, kept_there in zip(*results, strict=True):
        assert kept - kept_there > 0.95 * expected


def most_state_in_ram(options, name):
    """Return the most bytes of elementwise state found outside files when a bucket was stepped, and a bucket's."""
    booster, model, optimizer = boost({"bucket_bytes": 2**14, **options}, name, "bf16", width=64, depth=16)
    in_ram = []
    offload = type(optimizer.layout.buckets[0]).offload_state

    def look_and_offload(bucket, states):
        in_ram.append(
            sum(
                value.numel() * value.element_size()
                for state in states.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1 and not _is_in_file(value, options)
            )
        )
        offload(bucket, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer.layout.buckets[0]), "offload_state", look_and_offload)
        train(booster, model, optimizer, 2)
    return max(in_ram), max(bucket.values.numel() for bucket in optimizer.layout.buckets) * 4, in_ram[-1]


@pytest.mark.parametrize(
    ("name", "states"),
    [("sgd", 1), pytest.param("fused", 2, marks=pytest.mark.slow), pytest.param("adamw", 3, marks=pytest.mark.slow)],
)
def test_state_is_made_in_ram_for_one_bucket_at_a_time(name, states, tmp_path):
    for most, of_bucket, last in run_on_ranks(most_state_in_ram, 2, disk(str(tmp_path)), name):
        assert 0 < most <= states * of_bucket
        assert last == 0


# ---- what goes wrong


def refused(options):
    boost(options)


@pytest.mark.parametrize(("made", "message"), [(None, "does not exist"), ("file", "is no folder")])
def test_a_wrong_folder_is_refused_on_every_rank(made, message, tmp_path):
    path = tmp_path / "state"
    if made:
        path.write_text("x")
    errors = expect_on_ranks(ConfigError, message, refused, 2, disk(str(path)))
    assert all(f"offload_dir='{path}'" in str(error) for error in errors)


def refused_here_only(folder):
    mine = Path(folder) / f"of-{dist.get_rank()}"
    if dist.get_rank() == 0:
        mine.mkdir()
    boost(disk(str(mine)))


def test_a_folder_that_one_rank_lacks_is_refused_on_every_rank(tmp_path):
    expect_on_ranks(ConfigError, "of-1'` does not exist on this host", refused_here_only, 2, str(tmp_path))


class FullDisk:
    """Lets this rank's files have no more room than a number of bytes."""

    def __init__(self, num_bytes):
        self.left = num_bytes
        self._real = os.posix_fallocate

    def __enter__(self):
        os.posix_fallocate = self._take
        return self

    def __exit__(self, *_):
        os.posix_fallocate = self._real

    def _take(self, descriptor, start, size):
        if size > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= size
        self._real(descriptor, start, size)


def goes_on_after_a_full_disk(folder, checkpoint):
    """Fill rank 1's disk in the first step; save what is there; make room; train on; return that and what was saved."""
    booster, model, optimizer = boost(disk(folder))
    message = ""
    with FullDisk(3000 if dist.get_rank() == 1 else 2**40):
        try:
            train(booster, model, optimizer, 1)
        except OffloadError as error:
            message = str(error)
    optimizer.zero_grad()
    booster.save_model(model, f"{checkpoint}/model")
    booster.save_optimizer(optimizer, f"{checkpoint}/optimizer")
    train(booster, model, optimizer, 3, first=1)
    return message, {key: value.clone() for key, value in model.state_dict().items()}


def goes_on_from(checkpoint, options):
    booster, model, optimizer = boost(options)
    booster.load_model(model, f"{checkpoint}/model")
    booster.load_optimizer(optimizer, f"{checkpoint}/optimizer")
    train(booster, model, optimizer, 3, first=1)
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_full_disk_raises_on_every_rank_and_loses_nothing(tmp_path):
    folder, checkpoint = tmp_path / "state", tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.mkdir()
    results = run_on_ranks(goes_on_after_a_full_disk, 2, str(folder), str(checkpoint))
    expected = run_on_ranks(trained, 2, {}, "fused", "fp32", 4)[0]
    for message, parameters in results:
        assert f"offload_dir='{folder}'" in message
        assert " bytes, and " in message
        assert "The step was taken, and nothing is lost" in message
        assert all(torch.equal(expected[name], tensor) for name, tensor in parameters.items())
    for parameters in run_on_ranks(goes_on_from, 2, str(checkpoint), disk(str(folder))):
        assert all(torch.equal(expected[name], tensor) for name, tensor in parameters.items())


def boosts_on_a_full_disk(folder):
    with FullDisk(1000 if dist.get_rank() == 0 else 2**40):
        boost(disk(folder), precision="bf16")


def test_a_disk_without_room_for_masters_is_refused_by_boost(tmp_path):
    expect_on_ranks(OffloadError, r"needs \d+ bytes, and \d+ are free", boosts_on_a_full_disk, 2, str(tmp_path))


def loads_on_a_full_disk(folder, checkpoint):
    booster, model, optimizer = boost({})
    train(booster, model, optimizer, 1)
    booster.save_optimizer(optimizer, checkpoint)
    booster, model, optimizer = boost(disk(folder))
    with FullDisk(0 if dist.get_rank() == 1 else 2**40):
        booster.load_optimizer(optimizer, checkpoint)


def test_a_full_disk_stops_loading_on_every_rank(tmp_path):
    (tmp_path / "state").mkdir()
    paths = str(tmp_path / "state"), str(tmp_path / "checkpoint")
    expect_on_ranks(OffloadError, "nothing has been read yet", loads_on_a_full_disk, 2, *paths)


def files_of_state_made_before(folder):
    """State that is there at boost, that the first backward lays out again, and that is loaded, is in files."""
    net = make(width=64)
    optimizer = OPTIMIZERS["fused"](list(net.parameters()))
    net(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    booster = Booster("cpu", None, LowLevelZeroPlugin(bucket_bytes=4096, **disk(folder)))
    model, optimizer, *_ = booster.boost(net, optimizer)
    share = 2 * 4 * 4 * (64 * 64 + 64) // dist.get_world_size()
    seen = [mapped_bytes(folder)]
    train(booster, model, optimizer, 1)
    seen.append(mapped_bytes(folder))
    booster.save_optimizer(optimizer, f"{folder}/../saved")
    before = [value.clone() for state in optimizer.optim.state.values() for value in state.values()]
    booster.load_optimizer(optimizer, f"{folder}/../saved")
    seen.append(mapped_bytes(folder))
    after = [value for state in optimizer.optim.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return [found / share for found in seen]


def test_state_from_before_boost_is_in_files_too(tmp_path):
    (tmp_path / "state").mkdir()
    for seen in run_on_ranks(files_of_state_made_before, 2, str(tmp_path / "state")):
        assert seen == pytest.approx([1.0] * 3, rel=0.5), "files are whole pages"
