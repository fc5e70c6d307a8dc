"""Which files are the checkpoint: every form is found, what wins is fixed, and what is unclear is refused."""

import io
import json
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from booster_checkpoint import CheckpointEngine
from booster_checkpoint.files import torch_file
from booster_checkpoint.files.names import MODEL, OPTIMIZER, FileNames
from booster_checkpoint.files.tensor_file import TensorSpec
from booster_checkpoint.files.torch_file import load_plainly
from booster_checkpoint.load.source import open_source
from booster_checkpoint.save.plan import PlannedFile, split_into_files
from booster_core import Booster
from booster_core.checkpoint_io import CheckpointIO
from booster_core.errors import CheckpointDamagedError, CheckpointError, ConfigError
from booster_core.state import TensorShard, natural_order


def put(folder, name, value=1.0, keys=("a",)):
    tensors = {key: torch.full((2,), value) for key in keys}
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)


def index(folder, name, **files):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def value_in(path, kind=MODEL, key="a"):
    with open_source(path, kind) as source:
        return float(source.read_whole(key)[0])


def test_the_order_in_which_forms_win(tmp_path):
    put(tmp_path, "model.safetensors", 1)
    put(tmp_path, "model-00001-of-00001.safetensors", 2)
    index(tmp_path, "model.safetensors.index.json", a="model-00001-of-00001.safetensors")
    put(tmp_path, "pytorch_model.bin", 3)
    put(tmp_path, "pytorch_model-00001-of-00001.bin", 4)
    index(tmp_path, "pytorch_model.bin.index.json", a="pytorch_model-00001-of-00001.bin")
    assert value_in(tmp_path) == 1
    (tmp_path / "model.safetensors").unlink()
    assert value_in(tmp_path) == 2
    (tmp_path / "model.safetensors.index.json").unlink()
    assert value_in(tmp_path) == 3
    (tmp_path / "pytorch_model.bin").unlink()
    assert value_in(tmp_path) == 4
    assert value_in(tmp_path / "pytorch_model.bin.index.json") == 4
    assert value_in(tmp_path / "model-00001-of-00001.safetensors") == 2


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbered_files_without_an_index(suffix, tmp_path):
    put(tmp_path, f"model-00001-of-00002.{suffix}", 1, ["a"])
    with pytest.raises(CheckpointError, match=r"no index, and lacks 1 of 2 files: 'model-00002-of-00002"):
        value_in(tmp_path)
    put(tmp_path, f"model-00002-of-00002.{suffix}", 2, ["b"])
    assert (value_in(tmp_path), value_in(tmp_path, key="b")) == (1, 2)
    put(tmp_path, f"model-00001-of-00001.{suffix}", 3)
    with pytest.raises(CheckpointError, match=r"several sets of files, and no index .*Move those"):
        value_in(tmp_path)


def test_a_lone_file_of_any_name(tmp_path):
    put(tmp_path, "weights.safetensors", 5)
    assert value_in(tmp_path) == 5
    put(tmp_path, "more.safetensors", 6)
    with pytest.raises(CheckpointError, match=r"several model files: 'more.safetensors', 'weights.safetensors'"):
        value_in(tmp_path)


def test_a_prefix_is_found_where_there_is_one(tmp_path):
    put(tmp_path, "model.ema-00001-of-00001.safetensors", 7)
    index(tmp_path, "model.safetensors.index.ema.json", a="model.ema-00001-of-00001.safetensors")
    assert value_in(tmp_path) == 7
    put(tmp_path, "model.raw.safetensors", 8)
    with pytest.raises(CheckpointError, match="several model checkpoints"):
        value_in(tmp_path)


def test_model_and_optimizer_share_a_folder(tmp_path):
    put(tmp_path, "optimizer-00001-of-00001.safetensors", 1)
    index(tmp_path, "optimizer.safetensors.index.json", a="optimizer-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="holds no model checkpoint"):
        value_in(tmp_path)
    put(tmp_path, "weights.safetensors", 2)
    assert value_in(tmp_path) == 2
    assert value_in(tmp_path, OPTIMIZER) == 1


def test_a_kind_is_told_by_content_not_by_name(tmp_path):
    put(tmp_path, "m.safetensors", 1)
    shutil.move(tmp_path / "m.safetensors", tmp_path / "m.bin")
    put(tmp_path, "n.bin", 2)
    shutil.move(tmp_path / "n.bin", tmp_path / "n.safetensors")
    torch.save({"a": torch.full((2,), 3.0)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert [value_in(tmp_path / name) for name in ("m.bin", "n.safetensors", "old.bin")] == [1, 2, 3]


def test_names_as_hugging_face_writes_them():
    names = FileNames(base=MODEL, prefix="ema")
    assert (names.single, names.index) == ("model.ema.safetensors", "model.safetensors.index.ema.json")
    assert names.part(2, 3) == "model.ema-00002-of-00003.safetensors"
    assert names.is_part("model.ema-00002-of-00003.safetensors")
    assert not names.is_part("model-00002-of-00003.safetensors")


def test_files_are_filled_in_natural_order_up_to_a_size():
    shapes = {"l.10": 3, "l.2": 3, "big": 100, "l.1": 3, "²": 1}
    keys = sorted(shapes, key=natural_order)
    specs = [TensorSpec(key=key, shape=(shapes[key],), dtype=torch.uint8) for key in keys]
    files = [[spec.key for spec in file] for file in split_into_files(specs, 6)]
    assert files == [["big"], ["l.1", "l.2"], ["l.10", "²"]]
    assert [spec.key for spec in split_into_files(specs, None)[0]] == ["big", "l.1", "l.2", "l.10", "²"]
    assert split_into_files([], None) == [()]


def test_wider_elements_come_first_so_that_values_are_aligned(tmp_path):
    from booster_checkpoint.save.in_place import create_file

    specs = [
        TensorSpec(key="a", shape=(3,), dtype=torch.uint8),
        TensorSpec(key="b", shape=(3,), dtype=torch.float64),
        TensorSpec(key="c", shape=(3,), dtype=torch.bfloat16),
    ]
    (ordered,) = split_into_files(specs, None)
    path = tmp_path / "m.safetensors"
    frame = PlannedFile(name=path.name, suffix=".safetensors", specs=ordered).frame()
    create_file(path, frame)
    offsets = frame.offsets
    assert all(offsets[spec.key] % spec.dtype.itemsize == 0 for spec in specs)
    assert load_file(tmp_path / "m.safetensors").keys() == offsets.keys()


VALUES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
VIEWS = {
    "transposed": VALUES.view(12, 10).t(),
    "channels_last": VALUES.contiguous(memory_format=torch.channels_last),
    "permuted": VALUES.permute(3, 0, 2, 1),
    "sliced": VALUES[..., 1:3],
    "expanded": torch.ones(3, 1).expand(3, 4),
    "parameter": nn.Parameter(VALUES[1:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_in_a_file_of_torch_save_is_read(name, tmp_path):
    view = VIEWS[name]
    torch.save({"before": torch.ones(7), "view": view, "whole": VALUES, "after": torch.zeros(3)}, tmp_path / "m.bin")
    with open_source(tmp_path / "m.bin", MODEL) as source:
        assert source.tensors["view"].shape == tuple(view.shape)
        for dim, size in enumerate(view.shape):
            for first, last in ((0, 1), (size // 2, size), (0, size)):
                box = tuple((first, last) if each == dim else (0, other) for each, other in enumerate(view.shape))
                out = torch.empty(view.narrow(dim, first, last - first).numel())
                source.read("view", box, out)
                assert torch.equal(out, view.narrow(dim, first, last - first).reshape(-1))
        assert torch.equal(source.read_whole("whole"), VALUES)
        assert torch.equal(source.read_whole("after"), torch.zeros(3))


# ---- files of torch.save that others have made


PREFIX = b"\x80\x02}X\x01\x00\x00\x00x"
HOSTILE = {
    "a deep list": PREFIX + b"]" * 200_000 + b"N" + b"a" * 200_000 + b"s.",
    "zeros": PREFIX + b"cbuiltins\nbytearray\n(\x8a\x06\x00\x00\x00\x00\x00\x01tRs.",
    "a list in itself": PREFIX + b"]q\x00h\x00as.",
    "cut off": pickle.dumps({"x": [1, 2, 3]}, 2)[:-3],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(30)
def test_a_hostile_pickle_is_refused_at_once(name, tmp_path):
    path = tmp_path / "model.bin"
    torch.save({"w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as file:
        entries = {each: file.read(each) for each in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for each, old in entries.items():
            file.writestr(each, HOSTILE[name] if each.endswith("/data.pkl") else old)
    with pytest.raises(CheckpointDamagedError) as caught, open_source(path, "model"):
        pass
    assert len(str(caught.value)) < 1000


def test_what_people_share_is_read(tmp_path):
    """Lists, strings and tensors that a state holds in several places."""
    shared, weight = ["a", (1, 2), {"b": 3.0}], torch.arange(3.0)
    state = {"w": weight, "again": weight, "extra": [shared] * 2_000, "tuple": (shared, shared), "set": {1, 2}}
    for legacy in (False, True):
        torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=not legacy)
        with open_source(tmp_path / "model.bin", "model") as source:
            assert torch.equal(source.read_whole("again"), weight)
            assert len(source.values["extra"]) == 2_000
            assert source.values["extra"][-1] == ["a", {"$tuple": [1, 2]}, {"b": 3.0}]


@pytest.mark.parametrize(
    ("value", "match"), [(1 + 2j, r"model\.bin"), (torch.empty(2, device="meta"), "not a plain tensor")]
)
def test_what_has_no_form_or_no_values_is_refused(value, match, tmp_path):
    torch.save({"w": torch.ones(2), "extra": value}, tmp_path / "model.bin")
    with pytest.raises(CheckpointDamagedError, match=match), open_source(tmp_path / "model.bin", "model"):
        pass


@pytest.mark.parametrize("is_old", [False, True], ids=["this torch", "an older torch"])
def test_values_are_described_whichever_way_torch_does_it(is_old, monkeypatch):
    if is_old:
        monkeypatch.setattr(torch_file, "_tells_offsets_on_meta", lambda: False)
    stream, matrix = io.BytesIO(), torch.arange(12.0).view(3, 4)
    torch.save(matrix[1:], stream)
    stream.seek(0)
    described = load_plainly(stream, describe=True)
    assert described.shape == (2, 4)
    begin = torch_file.offset_of(described)
    assert stream.getvalue()[begin : begin + 32] == matrix[1:].numpy().tobytes()


# ---- `open_model`: a model's files are looked at first, and read in parts afterwards


class WithExtraState(nn.Linear):
    """Has state that is no tensor of its own."""

    def get_extra_state(self):
        return {"steps": 3, "table": torch.arange(4)}

    def set_extra_state(self, state):
        self.state = state


@pytest.fixture
def model():
    torch.manual_seed(0)
    return WithExtraState(6, 4)


@pytest.fixture
def path(model, tmp_path):
    Booster().save_model(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_read_in_the_shards_own_type(dtype, model, path):
    files = CheckpointEngine.open_model(path, model)
    assert {name: meta.shape for name, meta in files.tensors.items() if name in model.state_dict()} == {
        "weight": (4, 6),
        "bias": (4,),
    }
    about = {"name": "any", "global_shape": (4, 6), "dtype": dtype}
    box = TensorShard(**about, box=((1, 3), (2, 6)), data=torch.zeros(2, 4, dtype=dtype))
    flat = TensorShard(**about, box=((0, 4), (1, 5)), flat=(3, 14), data=torch.zeros(11, dtype=dtype))
    for _ in range(2):  # opened again as often as one likes
        with files:
            files.read("weight", box)
            files.read("weight", flat)
    assert torch.equal(box.data, model.weight.detach()[1:3, 2:6].to(dtype))
    assert torch.equal(flat.data, model.weight.detach()[:, 1:5].flatten()[3:14].to(dtype))


def test_extra_state_is_decoded(model, path):
    with CheckpointEngine.open_model(str(path), model) as files:
        (state,) = files.extra_values(["_extra_state", "absent"]).values()
        assert torch.equal(files.read_whole("bias"), model.bias)
    assert state["steps"] == 3
    assert torch.equal(state["table"], torch.arange(4))


def test_files_that_changed_or_are_gone_raise(model, path):
    files = CheckpointEngine.open_model(path, model)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"), files:
        pass
    Booster().save_model(nn.Linear(6, 5), path)
    with pytest.raises(CheckpointError, match=r"was changed: '\S+' was \(.*, and is (missing|\(5, 6\))"), files:
        pass
    Booster().save_model(model, path)
    with files:
        assert torch.equal(files.read_whole("bias"), model.bias)


def test_an_engine_without_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"`CheckpointIO` can't read models in parts; it has no `open_model`"):
        CheckpointIO.open_model(tmp_path)
