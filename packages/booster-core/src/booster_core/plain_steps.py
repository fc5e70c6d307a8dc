"""Whole training states as `PlainCheckpointIO` writes and reads them: one process' steps below one folder.

A step is written under a hidden name, described by a manifest with checksums, renamed, and named by ``latest``, each
after the one before is on disk: a kill at any instant leaves the newest complete step loadable. Names, manifest,
lease and contents are those of booster-checkpoint, which reads such a folder, and goes on saving there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from booster_core.checkpoint_io import LATEST, LOADER, NEWEST_WHOLE, GlobalPosition, new_step_name, parse_step_name
from booster_core.errors import CheckpointError, needs_checkpoint, shorten
from booster_core.log import log
from booster_core.plain_files import TOKEN, decoded, host_copy, read_tensors, sync, write_text
from booster_core.ranks import this_host
from booster_core.state import (
    capture_random_state,
    check_plain_tensors,
    decode_json,
    decode_runs,
    encode_json,
    encode_runs,
    read_json,
    restore_random_state,
    scheduler_from_json,
    scheduler_to_json,
    split_checksums,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from booster_core.checkpoint_io import StepOptions, TrainingObjects

MANIFEST = "manifest.json"
_MANIFEST_VERSION, _OLDEST_MANIFEST, _TRAINING_VERSION = 4, 3, 1
TRAINING, TRAINING_TENSORS = "training_state.json", "training_state.safetensors"
_BLOCK_BYTES = 4 << 20
_LEASE = "lease.json"
_HIDDEN = re.compile(rf"\.(step-\d{{8,}}(\.\d+)?|{LATEST}|{re.escape(_LEASE)})\.{TOKEN}\.tmp")


def steps_in(root: Path) -> dict[str, tuple[int, int]]:
    """Return the folders of complete steps with step and revision, the oldest first."""
    if not root.is_dir():
        return {}
    found = {entry.name: parse_step_name(entry.name) for entry in root.iterdir() if (entry / MANIFEST).is_file()}
    steps = {name: parsed for name, parsed in found.items() if parsed is not None}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def save_step(root: Path, options: StepOptions, facts: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Write a step that appears complete or not at all, and then remove those that no rule keeps.

    Args:
        root: The folder of all steps.
        options: Which step, and which stay.
        facts: What the manifest states of the run.
        write: Writes the step's files into a folder.

    Raises:
        CheckpointError: If it can't be written, or another job saves there now.
    """
    if root.exists() and not root.is_dir():
        msg = f"'{root}' is a file, but a folder of checkpoints is to be written there. Pass another path."
        raise CheckpointError(msg)
    hold_lease(root)
    for entry in root.iterdir():
        if _HIDDEN.fullmatch(entry.name):  # of a save or removal that was killed
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
    folder = root / f".{new_step_name(options.step, ())}.{secrets.token_hex(8)}.tmp"
    try:
        write(folder)
        write_text(folder / MANIFEST, json.dumps(_manifest_of(folder, options.step, facts), indent=1) + "\n")
        hold_lease(root)
        name = new_step_name(options.step, (entry.name for entry in root.iterdir()))
        folder.rename(root / name)
        sync(root)
        write_text(root / LATEST, f"{name}\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _prune(root, name, options)


def whole_step(root: Path, wanted: int | str, *, verify: bool) -> tuple[Path, list[str]]:
    """Return the folder of a step, and the files in it, which are what was saved.

    Args:
        root: The folder of all steps.
        wanted: A step, `LATEST`, or `NEWEST_WHOLE`, which goes back where later ones are damaged, and logs which.
        verify: Compare all bytes; else only sizes.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    names = _candidates(root, wanted)
    for name, older in zip(names, [*names[1:], None], strict=True):
        try:
            return root / name, _checked_files(root / name, verify=verify)
        except CheckpointError as error:
            if older is None:
                hint = "" if wanted == NEWEST_WHOLE else f" `step='{NEWEST_WHOLE}'` loads the newest that is whole."
                msg = f"{error}{hint}"
                raise CheckpointError(msg) from error
            log.warning("%s Trying '%s' instead.", error, older)
    msg = "there is one at least"
    raise AssertionError(msg)


def hold_lease(root: Path, *, take: bool = False) -> None:
    """Make sure that this process may save into a root: the last one that began to, or resumed, may.

    Args:
        root: The folder of all steps; made if it does not exist.
        take: Take the lease from whoever has it; else only where this process never had it.

    Raises:
        CheckpointError: If another job has taken it since, or it can't be written.
    """
    path, held, token = root / _LEASE, _held(os.getpid()), _token(os.getpid())
    found: Any = {}
    if path.is_file():
        with contextlib.suppress(CheckpointError):
            found = read_json(path)
        found = found if isinstance(found, dict) and found else {"host": None}  # of a damaged one nothing is known
    if found.get("token") != token:
        if found and root in held and not take:
            msg = (
                f"Another job saves into '{root}' now: process {found.get('pid')} of '{found.get('host')}'. This one "
                "has changed nothing there since, and may no longer save. If it is an earlier attempt of the same run, "
                "end it; if not, let one of the two save into another folder."
            )
            raise CheckpointError(msg)
        generation = found.get("generation")
        content = {
            "generation": generation + 1 if isinstance(generation, int) else 1,
            "token": token,
            "host": this_host().name,
            "pid": os.getpid(),
            "taken_at": _now(),
        }
        write_text(path, json.dumps(content) + "\n")
    held.add(root)


@functools.cache
def _token(pid: int) -> str:
    """Return text that no other process uses; a process may have several Boosters."""
    del pid
    return secrets.token_hex(8)


@functools.cache
def _held(pid: int) -> set[Path]:
    """Return the roots that this process has begun to save into."""
    del pid
    return set()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def training_content(objects: TrainingObjects, options: StepOptions) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a step holds besides model and optimizer: JSON, and the tensors that it refers to."""
    tensors: dict[str, Tensor] = {}
    random = capture_random_state(objects.device, "random/0", tensors)  # first: a state_dict may draw numbers
    objects.check_dataloader("state_dict")
    own: dict[str, Tensor] = {}
    extra = encode_json(options.extra, "extra", own)
    registered = {}
    for name, (item, per_rank) in objects.stateful().items():
        key = f"registered/{name}" + ("/0" if per_rank else "")
        registered[name] = {"per_rank": per_rank, "states": [encode_json(item.state_dict(), key, own)]}
    check_plain_tensors(own)
    loader = objects.dataloader if isinstance(objects.dataloader, GlobalPosition) else None
    content = {
        "format_version": _TRAINING_VERSION,
        "step": options.step,
        "lr_schedulers": [scheduler_to_json(scheduler) for scheduler in objects.schedulers],
        "loss_scaler": None if objects.loss_scaler is None else objects.loss_scaler.state_dict(),
        "dataloader": None if loader is None else encode_json(loader.state_dict(), "dataloader"),
        "extra": extra,
        "random": [random],
        "registered": registered,
    }
    return content, {key: host_copy(tensor) for key, tensor in (tensors | own).items()}


def read_training(where: Path) -> dict[str, Any]:
    """Return the JSON of `training_content`.

    Raises:
        CheckpointError: If the file holds something else.
    """
    content = read_json(where)
    if not isinstance(content, dict) or content.get("format_version") != _TRAINING_VERSION:
        msg = f"'{where}' does not hold a training state of format version {_TRAINING_VERSION}."
        raise CheckpointError(msg)
    lists = [content.get(name) for name in ("lr_schedulers", "random")]
    if {"step", "loss_scaler", "dataloader", "extra"} - content.keys() or not all(isinstance(e, list) for e in lists):
        msg = f"'{where}' is damaged: it lacks entries of a training state."
        raise CheckpointError(msg)
    return content


def registered_states(
    where: Path, content: Mapping[str, Any], objects: TrainingObjects, *, strict: bool
) -> dict[str, Any]:
    """Return the states of registered objects, by name.

    Raises:
        CheckpointError: If objects that are to be loaded were not saved alike.
    """
    num_saved = len(content["lr_schedulers"])
    if objects.schedulers and len(objects.schedulers) != num_saved:
        msg = (
            f"'{where}' holds the states of {num_saved} learning rate schedulers; {len(objects.schedulers)} are to be "
            "loaded. Pass those that were saved, in the same order, or none."
        )
        raise CheckpointError(msg)
    objects.check_dataloader("load_state_dict")
    saved, wanted = content.get("registered") or {}, objects.stateful()
    if objects.dataloader is not None and isinstance(objects.dataloader, GlobalPosition) != (LOADER not in saved):
        msg = f"'{where}' was saved with a data loader of another class. Make the loader as in the run that saved it."
        raise CheckpointError(msg)
    if isinstance(objects.dataloader, GlobalPosition) and content["dataloader"] is None:
        msg = f"'{where}' was saved without a data loader. Leave out `dataloader`."
        raise CheckpointError(msg)
    others = saved.keys() - {LOADER} if objects.registered else set[str]()
    problems = sorted((wanted.keys() - saved.keys()) | (others - wanted.keys()))
    if problems and strict:
        msg = (
            f"'{where}' does not fit what is registered: only one of them has {shorten(problems)}. Pass "
            "`strict=False` to load what fits."
        )
        raise CheckpointError(msg)
    chosen = {name: saved[name]["states"] for name in wanted if name in saved}
    apart = [name for name, states in chosen.items() if any(state != states[0] for state in states)]
    if apart:
        what = f"'{where}' has states of several ranks of {shorten(apart)}, which are read"
        raise CheckpointError(needs_checkpoint(what))
    return {name: states[0] for name, states in chosen.items()}


def restore_objects(
    objects: TrainingObjects, content: Mapping[str, Any], folder: Path, states: Mapping[str, Any]
) -> Any:
    """Put back what `training_content` returned, random states last.

    Args:
        objects: The objects; `registered_states` has checked them.
        content: The JSON.
        folder: The step's folder.
        states: What `registered_states` returned.

    Returns:
        The user's own values.
    """
    where, tensors = folder / TRAINING, read_tensors(folder / TRAINING_TENSORS)[0]
    for scheduler, saved in zip(objects.schedulers, content["lr_schedulers"], strict=False):
        scheduler_from_json(scheduler, saved, str(where))
    if objects.loss_scaler is not None and content["loss_scaler"] is not None:
        objects.loss_scaler.load_state_dict(content["loss_scaler"])
    if isinstance(objects.dataloader, GlobalPosition):
        objects.dataloader.load_state_dict(decode_json(content["dataloader"]))
    for name, saved in states.items():
        objects.stateful()[name][0].load_state_dict(decoded(saved, tensors))
    extra = decoded(content["extra"], tensors)
    restore_random_state(objects.device, content["random"][0], tensors)  # what comes before may draw numbers
    return extra


def _candidates(root: Path, wanted: int | str) -> list[str]:
    """Return the folders of steps to try, in this order.

    Raises:
        CheckpointError: If there is none.
    """
    steps = steps_in(root)
    pointer = root / LATEST
    latest = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None
    if wanted == NEWEST_WHOLE:
        before = [name for name in steps if latest not in steps or steps[name] <= steps[latest]]
        names = [*reversed(before), *(name for name in reversed(steps) if name not in before)]
    elif wanted == LATEST:
        names = [*steps][-1:] if latest is None else [latest] * (latest in steps)
    else:
        names = [name for name, (step, _) in steps.items() if step == wanted][-1:]
    if names:
        return names
    if not steps and latest is None:
        msg = (
            f"There is no checkpoint in '{root}'. Ask `booster.has_checkpoint(root)` first where a run may start from "
            "nothing."
        )
    elif wanted in (LATEST, NEWEST_WHOLE):
        msg = f"'{root}' names '{latest}' as its latest step, but that is missing or lacks its manifest."
    else:
        listed = ", ".join(str(step) for step, _ in [*steps.values()][-10:])
        msg = f"There is no step {wanted} in '{root}'. Steps there: {listed}."
    raise CheckpointError(msg)


def _manifest_of(folder: Path, step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what describes the files of a step."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        nbytes = path.stat().st_size
        blocks = [min(_BLOCK_BYTES, nbytes - begin) for begin in range(0, nbytes, _BLOCK_BYTES)]
        files[path.relative_to(folder).as_posix()] = {
            "nbytes": nbytes,
            "blocks": encode_runs(blocks),
            "xxh3": "".join(_checksums(path, blocks)),
        }
    content = {"format_version": _MANIFEST_VERSION, "step": step, **facts, "saved_at": _now(), "files": files}
    return {**content, "xxh3": _digest(content)}


def _read_manifest(folder: Path) -> dict[str, Any]:
    content = read_json(folder / MANIFEST)
    known = _OLDEST_MANIFEST, _MANIFEST_VERSION
    if not isinstance(content, dict) or content.get("format_version") not in known:
        msg = f"'{folder / MANIFEST}' is no manifest of format version {_OLDEST_MANIFEST} or {_MANIFEST_VERSION}."
        raise CheckpointError(msg)
    if content.pop("xxh3", None) != _digest(content):
        msg = f"The manifest '{folder / MANIFEST}' is damaged: its content is not what its own checksum says."
        raise CheckpointError(msg)
    return content


def _checked_files(folder: Path, *, verify: bool) -> list[str]:
    """Return the files of a step, if all are what was saved.

    Args:
        folder: The step's folder.
        verify: Compare all bytes; else only sizes.

    Raises:
        CheckpointError: If they are not.
    """
    damaged = list[str]()
    try:
        files = _read_manifest(folder)["files"]
        checksums = {name: split_checksums(entry["xxh3"]) for name, entry in files.items()}
        entries = {
            name: (decode_runs(entry["blocks"], len(checksums[name])), checksums[name]) for name, entry in files.items()
        }
        sizes = {name: sum(blocks) for name, (blocks, _) in entries.items() if min(blocks, default=0) >= 0}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"The manifest '{folder / MANIFEST}' is damaged: {error!r} where its entries should be."
        raise CheckpointError(msg) from error
    for name, (blocks, saved) in entries.items():
        path, parts = folder / name, PurePosixPath(name)
        if name not in sizes or ".." in parts.parts or parts.is_absolute():
            damaged.append(f"'{name}' is not in its folder, or has blocks of no size")
        elif not path.is_file() or path.stat().st_size != sizes[name]:
            damaged.append(f"'{name}' is missing, or has not the {sizes[name]} bytes that were saved")
        elif verify and _checksums(path, blocks) != saved:
            damaged.append(f"'{name}' has other content than what was saved")
    if damaged:
        msg = f"The checkpoint '{folder}' is damaged: {'; '.join(damaged[:10])}."
        raise CheckpointError(msg)
    return [*entries]


def _checksums(path: Path, sizes: Sequence[int]) -> list[str]:
    try:
        with path.open("rb") as stream:
            return [xxhash.xxh3_64_hexdigest(stream.read(size)) for size in sizes]
    except OSError as error:
        msg = f"'{path}' cannot be read: {error.strerror or error}."
        raise CheckpointError(msg) from error


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _prune(root: Path, kept: str, options: StepOptions) -> None:
    """Remove what is no longer wanted. The new step is safe by now, so a failure is logged and not raised."""
    steps, metrics, unknown = steps_in(root), dict[int, float](), set[int]()
    for name, (step, _) in steps.items() if options.keep_best is not None else ():
        try:
            metric = decode_json(_read_manifest(root / name).get("metric"))
        except CheckpointError as error:
            log.warning("'%s' is kept, since it is not known how good it is: %s", root / name, error)
            unknown.add(step)
        else:
            metrics |= {step: metric} if isinstance(metric, (int, float)) else {}
    wanted = options.kept({step for step, _ in steps.values() if step <= options.step}, metrics) | unknown
    for name, (step, _) in steps.items():
        if name != kept and (step == options.step or (step < options.step and step not in wanted)):
            hidden = root / f".{name}.{secrets.token_hex(8)}.tmp"
            try:
                (root / name).rename(hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                log.warning("'%s' could not be removed: %s. The next save tries again.", root / name, error)
