"""What core saves and loads by itself, beside what safetensors and torch say of the same state."""

import json
import logging
import os
import random
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from torch import nn

from booster_core import Booster, CheckpointIO, checkpoint_io, plain_files
from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.errors import CheckpointError, ConfigError
from booster_core.plain_checkpoint_io import PlainCheckpointIO
from booster_testing import expect_on_ranks, run_on_ranks


class Extra(nn.Module):
    """Has a state that is no tensor of its own."""

    def __init__(self):
        super().__init__()
        self.seen = {"count": 0, "scale": torch.zeros(3)}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Model(nn.Module):
    """Tied weights, buffers, dropout, tensors of several formats."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 8, bias=False)
        self.third = nn.Linear(16, 8, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(5).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.extra = Extra()

    def forward(self, x):
        hidden = self.drop(self.norm(self.first(x)))
        return self.second(hidden) + self.third(hidden)


class Run:
    """A run of one process that saves by core alone."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is what is saved
        self.booster = Booster("cpu")
        self.booster.checkpoint_io = PlainCheckpointIO(self.booster.plugin, self.booster.context)
        own = Model()
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(own, optimizer, lr_scheduler=scheduler)
        self.own = own
        self.step = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            noise = random.random() + np.random.rand()  # noqa: NPY002 - as above
            loss = self.model(torch.randn(4, 8) + noise).square().mean()
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.own.extra.seen["count"] += 1
            self.step += 1
            losses.append(loss.item())
        return losses

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def save(self, root, **options):
        self.booster.save_checkpoint(root, step=self.step, **self.objects(), **options)

    def load(self, root, **options):
        loaded = self.booster.load_checkpoint(root, **self.objects(), **options)
        self.step = loaded.step
        return loaded


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def is_same(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- files


def test_a_model_is_what_safetensors_reads(tmp_path):
    run = Run()
    run.train(2)
    path = tmp_path / "new" / "m.safetensors"
    run.booster.save_model(run.model, path)
    saved, expected = safetensors.torch.load_file(path), values(run.own)
    assert saved.keys() == expected.keys() - {"third.weight"} | {"extra._extra_state/scale"}
    for name in saved.keys() & expected.keys():
        assert saved[name].dtype == expected[name].dtype
        assert torch.equal(saved[name], expected[name])
    assert names_in(tmp_path) == ["new/m.safetensors"]

    other = Run(seed=1)
    report = other.booster.load_model(other.model, path)
    assert report.is_complete
    assert is_same(other.own, expected)
    assert other.own.extra.seen["count"] == 2
    assert torch.equal(other.own.extra.seen["scale"], torch.zeros(3))


def test_a_file_of_safetensors_loads(tmp_path):
    source = Run()
    expected = values(source.own)
    named = {name: tensor.contiguous() for name, tensor in expected.items() if name != "second.weight"}
    safetensors.torch.save_file(named, tmp_path / "model.safetensors")
    run = Run(seed=1)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: 'extra\._extra_state'"):
        run.booster.load_model(run.model, tmp_path)
    report = run.booster.load_model(run.model, tmp_path, strict=False)
    assert report.missing == ("extra._extra_state",)
    assert is_same(run.own, expected)


def test_a_model_that_does_not_fit_changes_nothing(tmp_path):
    run = Run()
    run.booster.save_model(nn.Linear(3, 3), tmp_path / "m.safetensors")
    before = values(run.own)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        run.booster.load_model(run.model, tmp_path / "m.safetensors")
    assert is_same(run.own, before)


def test_a_model_in_bf16_is_written_and_read(tmp_path):
    booster = Booster("cpu", mixed_precision="bf16")
    booster.checkpoint_io = PlainCheckpointIO(booster.plugin, booster.context)
    own = nn.Linear(4, 4).to(torch.bfloat16)
    expected = values(own)
    model, *_ = booster.boost(own)
    booster.save_model(model, tmp_path / "m.safetensors")
    saved = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert {name: tensor.dtype for name, tensor in saved.items()} == {"weight": torch.bfloat16, "bias": torch.bfloat16}
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_an_optimizer_goes_on_as_one_that_torch_loads(tmp_path):
    run = Run()
    run.train(3)
    run.booster.save_optimizer(run.optimizer, tmp_path / "o.safetensors")
    stored = run.optimizer.state_dict()
    tensors = safetensors.torch.load_file(tmp_path / "o.safetensors")
    position = [name for name, _ in run.own.named_parameters()].index("first.weight")
    assert torch.equal(tensors["first.weight/exp_avg"], stored["state"][position]["exp_avg"])
    other = Run(seed=1)
    other.booster.load_optimizer(other.optimizer, tmp_path / "o.safetensors")
    loaded = other.optimizer.state_dict()
    assert loaded["param_groups"] == stored["param_groups"]
    assert loaded["state"].keys() == stored["state"].keys()
    for position, state in stored["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][position][name], value)


def test_another_optimizer_is_refused(tmp_path):
    run = Run()
    run.train(1)
    run.booster.save_optimizer(run.optimizer, tmp_path / "o.safetensors")
    booster, model = run.booster, nn.Linear(2, 2)
    _boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match="is of another optimizer"):
        booster.load_optimizer(optimizer, tmp_path / "o.safetensors")


def test_a_scheduler_goes_on(tmp_path):
    run = Run()
    run.train(3)
    run.booster.save_lr_scheduler(run.scheduler, tmp_path / "s.json")
    other = Run(seed=1)
    other.booster.load_lr_scheduler(other.scheduler, tmp_path / "s.json")
    assert other.scheduler.state_dict() == run.scheduler.state_dict()


def test_state_that_would_be_lost_is_refused(tmp_path):
    run, model = Run(), nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, *rest: state.update(scale=torch.ones(1)))
    with pytest.raises(CheckpointError, match="1 entries of the model's `state_dict` would be lost: 'scale'"):
        run.booster.save_model(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


# ---- what goes wrong


def cut(tensors, path, metadata):
    """Write a part of a file, as where the disk is full."""
    path.write_bytes(b"the first bytes")
    raise OSError(28, "No space left on device")


def test_an_older_file_survives_a_failure(tmp_path, monkeypatch):
    path, run = tmp_path / "m.safetensors", Run()
    run.booster.save_model(run.model, path)
    before = path.read_bytes()
    run.train(1)
    monkeypatch.setattr(plain_files, "save_file", cut)
    with pytest.raises(CheckpointError, match=r"m\.safetensors' cannot be written: No space left on device"):
        run.booster.save_model(run.model, path)
    assert path.read_bytes() == before
    with pytest.raises(CheckpointError, match="No space left"):
        run.booster.save_model(run.model, tmp_path / "new" / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_step_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    run = Run()
    run.train(1)
    run.save(tmp_path)
    before = names_in(tmp_path)
    run.train(1)
    with monkeypatch.context() as patched:
        patched.setattr(plain_files, "save_file", cut)
        with pytest.raises(CheckpointError, match="No space left"):
            run.save(tmp_path)
    assert names_in(tmp_path) == before
    assert Run(seed=1).load(tmp_path).step == 1


def test_what_a_killed_save_left_is_cleared(tmp_path):
    run = Run()
    left = tmp_path / ".step-00000007.0123456789abcdef.tmp" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"a part")
    (tmp_path / ".latest.0123456789abcdef.tmp").write_text("step-0")
    (tmp_path / ".m.safetensors.0123456789abcdef.tmp").write_bytes(b"a part")
    run.save(tmp_path)
    run.booster.save_model(run.model, tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def save_until(root, instant):
    """Save step 2 in a process of its own that is killed before it waits for the disk for the given time."""
    run, real, calls = Run(seed=1), plain_files.os.fsync, []
    run.step = 2
    child = os.fork()
    if child == 0:

        def fsync(descriptor):
            calls.append(descriptor)
            if len(calls) > instant:
                os._exit(9)
            real(descriptor)

        plain_files.os.fsync = fsync
        run.save(root, keep_last=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_instant_leaves_a_step(tmp_path):
    root, instant, found = tmp_path / "run", 0, []
    while True:
        shutil.rmtree(root, ignore_errors=True)
        first = Run()
        first.step = 1
        first.save(root)
        code = save_until(root, instant)
        loaded = Run(seed=2)
        found.append(loaded.load(root, resume=True).step)
        assert is_same(loaded.own, values((first if found[-1] == 1 else Run(seed=1)).own))
        loaded.step = 3
        loaded.save(root, keep_last=1)
        assert [path.name for path in root.glob(".*")] == []
        assert steps_in(root) == [3]
        if code == 0:
            break
        instant += 1
    assert instant > 12
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{", b"{}", b"\xff" * 40])
def test_other_files_are_refused(content, tmp_path):
    run = Run()
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read as safetensors: .*pip install booster-checkpoint"):
        run.booster.load_model(run.model, path)


@pytest.mark.parametrize("home", ["../secret.safetensors", "a\\b", "", ".."])
def test_an_index_stays_in_its_folder(home, tmp_path):
    run, folder = Run(), tmp_path / "m"
    folder.mkdir()
    run.booster.save_model(run.model, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"first.weight": home}}))
    with pytest.raises(CheckpointError, match="names files that are not in its folder"):
        run.booster.load_model(run.model, folder, strict=False)


def test_tensors_that_files_lack_are_missed(tmp_path):
    run = Run()
    run.train(1)
    run.booster.save_optimizer(run.optimizer, tmp_path / "part.safetensors")
    homes = dict.fromkeys(safetensors.torch.load_file(tmp_path / "part.safetensors"), "part.safetensors")
    homes["gone.weight/exp_avg"] = "part.safetensors"
    (tmp_path / "optimizer.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    with pytest.raises(CheckpointError, match=r"names 1 tensors that its files lack: 'gone\.weight/exp_avg'"):
        run.booster.load_optimizer(run.optimizer, tmp_path)


def test_a_folder_of_two_saves_is_refused(tmp_path):
    run = Run()
    run.booster.save_model(run.model, tmp_path / "model.safetensors")
    (tmp_path / ".model.safetensors.index.json.interrupted").touch()
    with pytest.raises(CheckpointError, match="was interrupted"):
        run.booster.load_model(run.model, tmp_path)


# ---- training states


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    expected = Run().train(6)
    run = Run()
    losses = run.train(3)
    run.save(tmp_path, extra={"best": 1.5, "history": torch.arange(3)})
    random.seed(9)
    run = Run(seed=9)
    loaded = run.load(tmp_path)
    assert (loaded.step, loaded.extra["best"], loaded.path) == (3, 1.5, str(tmp_path / "step-00000003"))
    assert torch.equal(loaded.extra["history"], torch.arange(3))
    assert losses + run.train(3) == expected
    assert run.own.extra.seen["count"] == 6


def test_resuming_begins_at_nothing(tmp_path):
    run = Run()
    assert not run.booster.has_checkpoint(tmp_path)
    assert run.load(tmp_path, resume=True).step == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*has_checkpoint"):
        run.load(tmp_path)
    run.train(1)
    run.save(tmp_path)
    assert run.booster.has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no step 4 in .*Steps there: 1\."):
        run.load(tmp_path, step=4)


def saved_steps(root, metrics, **rules):
    run = Run()
    for metric in metrics:
        run.train(1)
        run.save(root, metric=metric, **rules)
    return run


def steps_in(root):
    return sorted(int(path.name.partition("-")[2]) for path in root.glob("step-*"))


def test_rules_keep_steps(tmp_path):
    saved_steps(tmp_path, [3.0, 1.0, 2.0, 5.0], keep_last=1, keep_best=1)
    assert steps_in(tmp_path) == [2, 4]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_same_step_again_replaces_it(tmp_path):
    run = saved_steps(tmp_path, [None])
    run.save(tmp_path)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001.1"]
    assert Run(seed=1).load(tmp_path).step == 1


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file", ["model/model.safetensors", "optimizer/optimizer.safetensors", "training_state.json", "manifest.json"]
)
def test_damage_is_found_before_anything_changes(file, tmp_path, caplog):
    saved_steps(tmp_path, [None, None])
    path = tmp_path / "step-00000002" / file
    content = path.read_text() if path.suffix == ".json" else None
    if content is None:
        flip(path)
    else:
        path.write_text(content.replace('"step": 2', '"step": 3'))
    run = Run(seed=1)
    before = values(run.own)
    with pytest.raises(CheckpointError, match=r"(?s)damaged.*`step='newest-whole'` loads"):
        run.load(tmp_path)
    assert is_same(run.own, before)
    with caplog.at_level(logging.WARNING):
        assert run.load(tmp_path, resume=True).step == 1
    assert "Trying 'step-00000001' instead" in caplog.text


@pytest.mark.parametrize(
    "entry",
    [
        {"nbytes": 1},
        {"blocks": 3, "xxh3": ""},
        {"blocks": "-5", "xxh3": "0"},
        {"blocks": "a", "xxh3": "0"},
        {"blocks": "1x999999999999", "xxh3": "0"},
    ],
)
def test_a_manifest_of_nonsense_is_an_error(entry, tmp_path):
    saved_steps(tmp_path, [None])
    path = tmp_path / "step-00000001" / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["model/model.safetensors"] = entry
    del content["xxh3"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())}))
    run = Run(seed=1)
    before = values(run.own)
    with pytest.raises(CheckpointError, match="damaged"):
        run.load(tmp_path)
    assert is_same(run.own, before)


def test_a_file_that_is_cut_is_found_without_checksums(tmp_path):
    saved_steps(tmp_path, [None])
    path = tmp_path / "step-00000001" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is missing, or has not the"):
        Run(seed=1).load(tmp_path, verify=False)


def test_what_was_not_saved_is_not_loaded(tmp_path):
    run = Run()
    run.booster.save_checkpoint(tmp_path, step=1, model=run.model)
    assert run.booster.load_checkpoint(tmp_path, model=run.model).step == 1
    with pytest.raises(CheckpointError, match="was saved without 'optimizer'"):
        run.booster.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer)
    with pytest.raises(CheckpointError, match="holds the states of 0 learning rate schedulers; 1 are"):
        run.booster.load_checkpoint(tmp_path, model=run.model, lr_scheduler=run.scheduler)


def test_an_earlier_job_saves_no_longer(tmp_path):
    run = saved_steps(tmp_path, [None])
    lease = json.loads((tmp_path / "lease.json").read_text())
    (tmp_path / "lease.json").write_text(json.dumps({**lease, "token": "f" * 16, "pid": 1, "host": "elsewhere"}))
    before = names_in(tmp_path)
    run.train(1)
    with pytest.raises(CheckpointError, match=r"Another job saves into .* process 1 of 'elsewhere'"):
        run.save(tmp_path)
    assert names_in(tmp_path) == before
    run.load(tmp_path, resume=True)  # takes over
    run.save(tmp_path)


class Counter:
    """Has a state of its own; stands for a data loader, too."""

    def __init__(self, count=0):
        self.count = count

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def load_state_dict(self, state):
        assert int(state["seen"]) == state["count"]
        self.count = state["count"]


@pytest.mark.parametrize("per_rank", [False, True])
def test_registered_objects_and_loaders_come_back(per_rank, tmp_path):
    run, counter = Run(), Counter(5)
    run.booster.register_for_checkpointing(counter, name="counter", per_rank=per_rank)
    run.save(tmp_path, dataloader=Counter(7))
    other, again, loader = Run(seed=1), Counter(), Counter()
    other.booster.register_for_checkpointing(again, name="counter", per_rank=per_rank)
    other.load(tmp_path, dataloader=loader)
    assert (again.count, loader.count) == (5, 7)
    strange = Run(seed=2)
    strange.booster.register_for_checkpointing(Counter(), name="other")
    with pytest.raises(CheckpointError, match="only one of them has 'counter', 'other'"):
        strange.load(tmp_path)
    strange.load(tmp_path, strict=False)


def test_what_cannot_be_saved_is_named(tmp_path):
    run = Run()
    with pytest.raises(CheckpointError, match="'extra/f' is a"):
        run.save(tmp_path / "run", extra={"f": len})
    with pytest.raises(CheckpointError, match="`list`, which cannot tell its position"):
        run.save(tmp_path / "run", dataloader=[1])
    with pytest.raises(ConfigError, match="`keep_last=0`"):
        run.save(tmp_path / "run", keep_last=0)
    assert list(tmp_path.iterdir()) == []


# ---- what needs another engine


REFUSED = {
    "shard": lambda run, path: run.booster.save_model(run.model, path / "m", shard=True),
    "bin": lambda run, path: run.booster.save_model(run.model, path / "m.bin"),
    "torch.save": lambda run, path: run.booster.save_model(run.model, path / "m", use_safetensors=False),
    "dcp": lambda run, path: run.booster.save_model(run.model, path / "m", gather_dtensor=False),
    "background": lambda run, path: run.booster.save_model(run.model, path / "m", use_async=True),
    "variant": lambda run, path: run.booster.save_model(run.model, path / "m", prefix="ema"),
    "optimizer": lambda run, path: run.booster.save_optimizer(run.optimizer, path / "o", shard=True),
    "step": lambda run, path: run.save(path / "run", use_async=True),
    "url": lambda run, _: run.booster.save_model(run.model, "memory://m.safetensors"),
    "url-step": lambda run, _: run.save("memory://run"),
    "url-root": lambda run, _: run.booster.has_checkpoint("memory://run"),
    "url-load": lambda run, _: run.booster.load_model(run.model, "memory://m.safetensors"),
    "rename": lambda run, path: run.booster.load_model(run.model, path, rename={"a": "b"}),
    "exclude": lambda run, path: run.booster.load_model(run.model, path, exclude=["a"]),
    "folder": lambda run, path: run.booster.load_model(run.model, path),
    "lora": lambda run, path: run.booster.save_lora_as_pretrained(run.model, path),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_another_engine_does_is_refused_by_its_name(call, tmp_path):
    run = Run()
    before = values(run.own)
    with pytest.raises((CheckpointError, ConfigError), match="Run `pip install booster-checkpoint`"):
        REFUSED[call](run, tmp_path)
    assert is_same(run.own, before)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_its_own_folder_form_needs_a_file_name(tmp_path):
    run, model = Run(), nn.Linear(2, 2)
    model.save_pretrained = lambda folder: None
    with pytest.raises(ConfigError, match=r"pip install booster-checkpoint`. Or pass '.*out\.safetensors'"):
        run.booster.save_model(model, tmp_path / "out")
    run.booster.save_model(model, tmp_path / "out.safetensors")
    assert names_in(tmp_path) == ["out.safetensors"]


def save_on_ranks(folder):
    booster = Booster("cpu")
    booster.checkpoint_io = PlainCheckpointIO(booster.plugin, booster.context)
    booster.save_model(nn.Linear(2, 2), folder + "/m.safetensors")


def test_several_ranks_are_refused_on_each(tmp_path):
    expect_on_ranks(
        CheckpointError, "`save_model` of several ranks is done by booster-checkpoint", save_on_ranks, 2, str(tmp_path)
    )
    assert list(tmp_path.iterdir()) == []
    run_on_ranks(save_on_ranks, 1, str(tmp_path))
    assert names_in(tmp_path) == ["m.safetensors"]


# ---- which engine


class Entry:
    """An entry point of a distribution."""

    name, dist = "files", None

    def load(self):
        return CheckpointIO


@pytest.mark.parametrize(("entries", "expected"), [([], PlainCheckpointIO), ([Entry()], CheckpointIO)])
def test_an_installed_engine_goes_before_the_plain_one(entries, expected, monkeypatch):
    by_name = {entry.name: [entry] for entry in entries}
    monkeypatch.setattr(checkpoint_io, "entry_points_by_name", lambda _: by_name)
    assert checkpoint_io_class() is expected
