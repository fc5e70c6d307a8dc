"""Averages of weights equal torch's own, whoever holds the shards, and come and go without a trace in the model."""

import pytest
import torch
from ranked import on_ranks
from resumable import ResumableRun as Run
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import booster_runtime
from booster_core.errors import CheckpointError, ConfigError
from booster_testing import run_on_ranks


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@on_ranks("world_size")
def test_equals_torch(decay, world_size):
    run = Run()
    reference = AveragedModel(run.model.unwrap(), multi_avg_fn=get_ema_multi_avg_fn(decay))
    reference.update_parameters(run.model.unwrap())  # its first update copies
    ema = booster_runtime.ema(run.booster, run.model, decay)
    for step in range(1, 6):
        run.train(step)
        reference.update_parameters(run.model.unwrap())
        ema.update()
    expected = reference.module.state_dict()
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with ema.applied():
        inside = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    after = run.model.state_dict()
    assert all(torch.equal(inside[name], expected[name]) for name in expected)
    assert all(torch.equal(inside[name], before[name]) for name in before) == (decay == 0.0)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(inside["seen"], before["seen"])  # a buffer: copied


def train_and_save(folder, use_async):
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model, 0.5)
    for step in range(1, 4):
        with torch.no_grad():
            for index, parameter in enumerate(run.model.parameters()):
                parameter.fill_(index + step / 3)
        ema.update()
    ema.save(folder, shard=True, use_async=use_async)
    ema.update()
    run.booster.wait()


@pytest.mark.parametrize("use_async", [False, True])
def test_files_do_not_depend_on_the_number_of_ranks(use_async, tmp_path):
    for world_size in (1, 2):
        run_on_ranks(train_and_save, world_size, str(tmp_path / f"{world_size}"), use_async)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert load_file(tmp_path / "1" / names[0])["first.weight"].shape == (32, 8)


def test_the_model_gets_its_weights_back_after_an_error():
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model, 0.9)
    run.train(2)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        raise RuntimeError("inside")  # noqa: EM101 - a test's own
    assert all(torch.equal(run.model.state_dict()[name], before[name]) for name in before)
    ema.update()  # works again


def test_bf16_weights_are_averaged_in_fp32():
    run = Run()
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    ema = booster_runtime.ema(run.booster, model, 0.9999)
    torch.nn.init.constant_(model.weight, 2.0)
    for _ in range(10):
        ema.update()
    (shard,) = ema.shards()
    assert shard.dtype == torch.float32
    assert shard.data.mean().item() == pytest.approx(2 - 0.9999**10, abs=1e-6)
    with ema.applied():
        assert model.weight.dtype == torch.bfloat16


def test_a_tied_weight_is_averaged_once():
    from booster_testing.models import TinyMixedBag

    run = Run()
    model = TinyMixedBag()
    names = [shard.name for shard in booster_runtime.ema(run.booster, model).shards()]
    assert "embedding.weight" in names
    assert "head.weight" not in names


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    run = Run()
    with pytest.raises(ConfigError, match="`decay="):
        booster_runtime.ema(run.booster, run.model, decay)
    with pytest.raises(ConfigError, match="`decay="):
        booster_runtime.ema(run.booster, run.model).update(decay)


def test_nothing_changes_inside_of_applied():
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model, 0.9)
    with ema.applied():
        with pytest.raises(ConfigError, match="`update` inside of `applied`"):
            ema.update()
        with pytest.raises(ConfigError, match="`applied` inside of `applied`"), ema.applied():
            pass


def save_whole_state(folder, use_async):
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model, 0.5)
    with torch.no_grad():
        for index, parameter in enumerate(run.model.parameters()):
            parameter.fill_(index + 1.0)
    ema.update()
    run.booster.save_checkpoint(folder, step=1, model=run.model, optimizer=run.optimizer, ema=ema, use_async=use_async)
    expected = {shard.name: shard.data.clone() for shard in ema.shards()}
    ema.update()  # what is saved in the background is what was there before
    run.booster.wait()
    run.booster.save_checkpoint(folder, step=0, model=run.model)
    return {name: tensor for name, tensor in expected.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("use_async", [False, True])
def test_averages_are_part_of_the_training_state(use_async, tmp_path):
    expected = run_on_ranks(save_whole_state, 2, str(tmp_path), use_async)[0]
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model, 0.5)
    run.booster.load_checkpoint(tmp_path, step=1, model=run.model, optimizer=run.optimizer, ema=ema)
    averages = {shard.name: shard.data for shard in ema.shards()}
    assert all(torch.equal(averages[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(run.model.state_dict()["first.weight"], averages["first.weight"])
    (file,) = (tmp_path / "step-00000001" / "ema").glob("*.safetensors")
    assert torch.equal(load_file(file)["first.weight"], expected["first.weight"])


def test_a_state_without_averages_is_not_loaded_with_them(tmp_path):
    save_whole_state(tmp_path, use_async=False)
    run = Run()
    with pytest.raises(CheckpointError, match="was saved without 'ema'"):
        run.booster.load_checkpoint(tmp_path, step=0, model=run.model, ema=booster_runtime.ema(run.booster, run.model))


def test_averages_are_not_saved_while_they_are_applied(tmp_path):
    run = Run()
    ema = booster_runtime.ema(run.booster, run.model)
    with ema.applied(), pytest.raises(ConfigError, match="Leave the `with` block first"):
        run.booster.save_checkpoint(tmp_path, step=0, model=run.model, ema=ema)


def test_averages_of_another_kind_are_refused(tmp_path):
    run = Run()
    with pytest.raises(TypeError, match=r"must have a method `state_adapter`; got `dict`"):
        run.booster.save_checkpoint(tmp_path, step=0, model=run.model, ema={})
