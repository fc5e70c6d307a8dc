"""Folders into which each rank wrote its own part of each tensor load as one model, or are refused."""

import json

import pytest
import torch
from named_plugins import make_model, plugin_named
from ranked import on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard, distribute_tensor

from booster_checkpoint.load import open_source
from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_core.ranks import DistCoordinator

WHOLE = {"rows": torch.arange(30.0).reshape(5, 6), "columns": torch.arange(40).reshape(4, 10), "one": torch.tensor(2.5)}


def write(folder, number, **parts):
    """Write a rank's file, of parts that are given as their beginning and their values."""
    folder.mkdir(exist_ok=True)
    places = json.dumps({key: {"saved_offsets": begin} for key, (begin, _) in parts.items()})
    tensors = {key: values.contiguous() for key, (_, values) in parts.items()}
    save_file(tensors, folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": places})


def write_two(folder):
    rows, columns = WHOLE["rows"], WHOLE["columns"]
    write(folder, 1, rows=([0, 0], rows[:3]), columns=([0, 0], columns[:, :4]), one=([], WHOLE["one"]))
    write(folder, 2, rows=([3, 0], rows[3:]), columns=([0, 4], columns[:, 4:]))


def test_parts_of_ranks_are_read_as_whole_tensors(tmp_path):
    write_two(tmp_path / "model")
    with open_source(tmp_path / "model", "model") as source:
        assert {key: meta.shape for key, meta in source.tensors.items()} == {k: t.shape for k, t in WHOLE.items()}
        for key, whole in WHOLE.items():
            assert torch.equal(source.read_whole(key), whole)
        part = torch.empty(2 * 3, dtype=torch.int64)
        source.read("columns", ((1, 3), (3, 6)), part)
        assert torch.equal(part.view(2, 3), WHOLE["columns"][1:3, 3:6])
        part = torch.empty(2 * 6)
        source.read("rows", ((2, 4), (0, 6)), part)
        assert torch.equal(part.view(2, 6), WHOLE["rows"][2:4])


def stale(folder):
    write(folder, 3, rows=([4, 0], WHOLE["rows"][4:]))
    return "'rows' is in 'shard-00002-.*' and again in 'shard-00003-.*two saves"


def lost(folder):
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    return "Parts of '(rows|columns)' are in none of the 1 files"


def beside_a_whole_model(folder):
    save_file(WHOLE, folder / "model.safetensors")
    return r"a whole model \('model.safetensors'\) and files that each rank wrote for itself"


def other_format(folder):
    write(folder, 2, rows=([3, 0], WHOLE["rows"][3:].double()), columns=([0, 4], WHOLE["columns"][:, 4:]))
    return "parts of 'rows' of other formats"


def without_places(folder):
    save_file({"rows": WHOLE["rows"][3:]}, folder / "shard-00002-model-00001-of-00001.safetensors")
    return "does not say where in its tensors its parts begin"


def at_no_place(folder):
    write(folder, 2, rows=([-3, 0], WHOLE["rows"][3:]))
    return r"says that its part of 'rows' begins at \[-3, 0\]"


@pytest.mark.parametrize(
    "spoil",
    [stale, lost, beside_a_whole_model, other_format, without_places, at_no_place],
    ids=lambda each: each.__name__,
)
def test_what_is_not_one_save_is_refused(spoil, tmp_path):
    folder = tmp_path / "model"
    write_two(folder)
    message = spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught, open_source(folder, "model"):
        pass
    assert "elete" not in str(caught.value)


@on_ranks(2)
def test_what_torch_writes_is_read(tmp_path):
    """A tensor split by rows, one by columns, and one whole."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(WHOLE["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE["columns"], mesh, [Shard(1)]),
        "one": WHOLE["one"],
    }
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "model"), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    with open_source(tmp_path / "model", "model") as source:
        for key, whole in WHOLE.items():
            assert torch.equal(source.read_whole(key), whole)


def test_a_root_of_other_folders_names_them(tmp_path):
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    with (
        pytest.raises(
            CheckpointError, match=r"torch.distributed.checkpoint: 'optimizer_0', 'pytorch_model_fsdp_0'. Pass"
        ),
        open_source(tmp_path, "model"),
    ):
        pass


def train_by_transformers(folder, sizes):
    """Let transformers distribute a model, train it, and write model and optimizer in all of its forms."""
    import torch.distributed.checkpoint.state_dict as states
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.checkpoint import consolidate_distributed_checkpoint, save_optimizer_distributed

    coordinator = DistCoordinator()
    if coordinator.is_master():
        make_model().save_pretrained(folder / "start")
    coordinator.block_all()
    model = AutoModelForCausalLM.from_pretrained(folder / "start", distributed_config=DistributedConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss.backward()
    optimizer.step()
    model.save_pretrained(folder / "parts", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(folder / "optimizer"))
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = (
        states.get_model_state_dict(model, options=options),
        states.get_optimizer_state_dict(model, optimizer, options=options),
    )
    if coordinator.is_master():
        consolidate_distributed_checkpoint(folder / "parts", folder / "consolidated")
        torch.save(whole, folder / "expected.pt")


@pytest.fixture
def distributing():
    pytest.importorskip("transformers", "5.20", reason="earlier ones have another configuration")


@pytest.mark.usefixtures("distributing")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sizes", [pytest.param({"fsdp_size": 2}, marks=pytest.mark.slow), {"tp_size": 2}], ids=str)
@on_ranks(2)
def test_what_transformers_trained_loads_with_its_optimizer(sizes, tmp_path):
    train_by_transformers(tmp_path, sizes)
    DistCoordinator().block_all()
    whole, of_optimizer = torch.load(tmp_path / "expected.pt", weights_only=True)
    for name in ("zero", "gemini", "fsdp"):
        model = make_model()
        booster = Booster("cpu", plugin=plugin_named(name))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.5))
        for form in ("parts", "consolidated"):
            with torch.no_grad(), boosted.whole_parameters(writes=True):
                for parameter in boosted.parameters():
                    parameter.zero_()
            booster.load_model(boosted, tmp_path / form)
            booster.save_model(boosted, tmp_path / f"{name}-{form}.safetensors")
            found = load_file(tmp_path / f"{name}-{form}.safetensors")
            assert all(torch.equal(whole[key], tensor) for key, tensor in found.items())
            assert len(found) >= len(make_model().state_dict()) - 1  # the head may be tied
        booster.load_optimizer(optimizer, tmp_path / "optimizer")
        assert optimizer.param_groups[0]["lr"] == 0.01
        booster.save_optimizer(optimizer, tmp_path / f"{name}-optimizer.safetensors")
        states = load_file(tmp_path / f"{name}-optimizer.safetensors")
        expected = {f"{key}/{state}": value for key, of in of_optimizer["state"].items() for state, value in of.items()}
        found = {key: value for key, value in states.items() if not key.endswith("/step")}
        assert {key for key in expected if not key.endswith("/step")} == found.keys()
        assert all(torch.equal(expected[key], value) for key, value in found.items())


@pytest.mark.usefixtures("distributing")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["zero", "fsdp"])
@on_ranks(2)
def test_transformers_distributes_what_we_save(name, tmp_path):
    import torch.distributed.checkpoint.state_dict as states
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    coordinator, model = DistCoordinator(), make_model()
    booster = Booster("cpu", plugin=plugin_named(name))
    boosted, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save_model(boosted, tmp_path, shard=True)
    if coordinator.is_master():
        model.config.save_pretrained(tmp_path)
    coordinator.block_all()
    expected = make_model().state_dict()
    for sizes in ({}, {"fsdp_size": 2}, {"tp_size": 2}):
        options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        found = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
        if coordinator.is_master():
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[key], found[key]) for key in expected)
