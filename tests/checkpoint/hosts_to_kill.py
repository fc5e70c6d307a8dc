"""Kills two ranks again and again while they save from two hosts, and loads after each kill; prints JSON.

The hosts are mount namespaces. Each sees the folder of checkpoints through a FUSE mount with a page cache of its own,
as it would see an NFS export (`tests/shared/fuse_mirror.py`).
"""

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from booster_core.ranks.store import this_host
from booster_core.ranks.world import close_world, open_world

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from reference_plugins import ReferencePlugin
from tests.checkpoint.saver_to_kill import kill, live, look, make, wait_for
from tests.shared.fuse_mirror import mounted_mirror

_CLONE_NEWNS = 0x20000


def move_to_host(point, root):
    """Give this process a mount namespace, in which the root is another mount."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (["mount", "--make-rprivate", "/"], ["mount", "--bind", str(point), str(root)]):
        subprocess.run(command, check=True)


def look_from(point, folder, rank):
    """Load as the host of a rank sees it, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            move_to_host(point, folder / "root")
            (folder / f"seen-{rank}.json").write_text(json.dumps(look(folder)))
        except Exception as error:  # noqa: BLE001 - told to the test
            (folder / f"seen-{rank}.json").write_text(json.dumps([-1, traceback.format_exception(error)]))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return json.loads((folder / f"seen-{rank}.json").read_text())


def import_all(folder):
    """Import here what ranks need: each life is a fork, which would import it again."""
    import booster_checkpoint.save.owners  # noqa: F401

    booster, model, optimizer = make(None)
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    store = dist.FileStore(str(folder / "store"), 1)
    open_world(store, rank=0, world_size=1, local_rank=0, backend="gloo", timeout_seconds=60)
    make(ReferencePlugin())
    close_world()
    gc.collect()  # a process group that a fork collects waits for threads that only this process has


def main(folder, seed, lives):
    import_all(folder / "warm")
    chance = random.Random(seed)
    found, hosts = [], set()
    backing, points = folder / "export", [folder / f"mount-{rank}" for rank in (0, 1)]
    for path in (backing, *points, folder / "root"):
        path.mkdir()
    (folder / "saved").write_text("0\n")
    with mounted_mirror(backing, points[0]), mounted_mirror(backing, points[1]):
        for life in range(lives):
            pids = []
            for rank in (0, 1):
                pid = os.fork()
                if pid == 0:
                    try:
                        move_to_host(points[rank], folder / "root")
                        (folder / f"host-{rank}").write_text(this_host().to_text())
                        live(rank, folder, life, use_async=life % 3 == 2)
                    finally:
                        os._exit(1)
                pids.append(pid)
            wait_for([folder / f"ready-{life}-{rank}" for rank in (0, 1)], 300)
            hosts |= {(folder / f"host-{rank}").read_text() for rank in (0, 1)}
            time.sleep(chance.uniform(0.1, 0.8))
            kill(pids, [pids, pids[:1], pids[1:]][life % 3])
            seen = [look_from(points[rank], folder, rank) for rank in (0, 1)]
            saved = int((folder / "saved").read_text().split()[-1])
            found.append({"seen": seen, "saved": saved})
            print(found[-1], file=sys.stderr, flush=True)
    print(json.dumps({"lives": found, "hosts": len(hosts)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
