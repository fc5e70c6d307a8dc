"""The bytes of every file of every form, against a table: the same state gives the same files, whoever writes it how.

The table is `golden_state.TABLE`. ``python tests/checkpoint/test_golden_digests.py`` from the root of the
repository writes it again, where a format is meant to change: a checkpoint of before must still load then.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":  # pytest.ini has this path
    sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

import golden_state
from golden_state import STEP, TABLE, digests, expected, named
from matrix import matrix

from booster_checkpoint.run.manifest import verify_folder
from booster_testing import close_ranks, run_on_ranks

LAYOUTS = {
    "one": ("replicated", 1, None),
    "flat": ("flat", 2, None),
    "columns": ("columns", 3, None),
    "stages": ("stages", 2, None),
    "hosts": ("columns_flat", 3, [0, 1, 1]),
    "hosts of flat": ("flat", 2, [0, 1]),
}
RANKS = {"one": (1, None), "two": (2, None), "three": (3, None), "hosts": (3, [0, 1, 1])}


def save(function, world_size, folder, *args, at_url=False):
    """Save on ranks; return the folder of the files."""
    if at_url:
        run_on_ranks(golden_state.save_at_url, world_size, str(folder), function, *args)
        return folder / "at"
    run_on_ranks(getattr(golden_state, function), world_size, str(folder), *args)
    return folder


@matrix(
    ["one-False-False", "flat-True-False", "hosts-False-False", "columns-False-False", "columns-False-True"],
    where=LAYOUTS,
    use_async=[False, True],
    at_url=[False, True],
)
def test_models_and_optimizers(where, use_async, at_url, tmp_path):
    layout, world_size, hosts = LAYOUTS[where]
    folder = save("save_layout", world_size, tmp_path, layout, hosts, use_async, at_url=at_url)
    assert digests(folder) == expected("layout")


@matrix(
    ["one-False-False", "two-True-False", "hosts-True-False", "three-False-True"],
    where=RANKS,
    use_async=[False, True],
    at_url=[False, True],
)
def test_a_step_a_scheduler_and_an_average(where, use_async, at_url, tmp_path):
    world_size, hosts = RANKS[where]
    folder = save("save_run", world_size, tmp_path, hosts, use_async, at_url=at_url)
    assert named(digests(folder), world_size) == expected("run", world_size)
    verify_folder(folder / STEP)


def configurations(folder):
    """Return what each says; peft writes sets, each time in another order."""
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
    for entries in found.values():
        for name in ("target_modules", "modules_to_save"):
            if isinstance(entries.get(name), list):
                entries[name] = sorted(entries[name])
    return found


@matrix(["one", "hosts"], where=RANKS)
def test_folders_of_transformers_and_peft(where, tmp_path):
    """What the libraries say of a model and its adapters is as they write it, and the tensors are in the table."""
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    world_size, hosts = RANKS[where]
    ours, theirs = save("save_transformers", world_size, tmp_path / "ours", hosts), tmp_path / "theirs"
    found = {name: digest for name, digest in digests(ours).items() if not name.endswith("config.json")}
    assert found == expected("transformers")
    golden_state.language_model().save_pretrained(theirs / "model")
    golden_state.with_adapters().save_pretrained(theirs / "lora")
    pairs = [("saved", "model"), ("lora", "lora"), ("lora/other", "lora/other")]
    for our, their in pairs:
        assert configurations(theirs / their), their
        assert configurations(ours / our) == configurations(theirs / their)
    assert configurations(ours / "pretrained") == configurations(ours / "saved")


def raw_digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.bin"))}


def test_files_of_torch_save_have_the_same_bytes(tmp_path):
    one = raw_digests(save("save_layout", 1, tmp_path / "one", "replicated"))
    assert raw_digests(save("save_layout", 2, tmp_path / "two", "flat")) == one
    assert raw_digests(save("save_layout", 3, tmp_path / "hosts", "columns_flat", [0, 1, 1])) == one


def change_one_bit(tensors):
    """Return tensors of which one has another lowest bit in one value."""
    return {**tensors, "wide": tensors["wide"].view(torch.int32).bitwise_xor(1).view(torch.float32)}


def test_what_the_table_describes_loads(tmp_path):
    """A new process reads what the table says is written: the table is no table of damaged files."""
    run_on_ranks(golden_state.save_run, 1, str(tmp_path))
    module = golden_state.Small()
    booster, model, optimizer, loader, scheduler = golden_state.boosted(None, module)
    golden_state.fill(module, "weights")
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    booster.register_for_checkpointing(golden_state.Counter())
    with torch.no_grad():
        for parameter in module.parameters():
            optimizer.unwrap().state[parameter]["momentum"].zero_()
            parameter.zero_()
    loaded = booster.load_checkpoint(tmp_path / "run", **objects)
    wanted = golden_state.Small()
    golden_state.fill(wanted, "later")
    torch.testing.assert_close(module.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    for name, parameter in module.named_parameters():
        momentum = golden_state.value_of(f"momentum/{name}", tuple(parameter.shape), torch.float32)
        assert torch.equal(optimizer.unwrap().state[parameter]["momentum"], momentum)
    assert loaded.extra["note"] == "ü"


def write_table():
    """Write the table."""
    written = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written["layout"] = digests(save("save_layout", 1, folder / "layout", "replicated"))
        written["run"] = {}
        for world_size in (1, 2, 3):
            written["run"] |= named(digests(save("save_run", world_size, folder / f"run{world_size}")), world_size)
        found = digests(save("save_transformers", 1, folder / "transformers"))
        written["transformers"] = {name: each for name, each in found.items() if not name.endswith("config.json")}
    close_ranks()
    TABLE.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_table()
