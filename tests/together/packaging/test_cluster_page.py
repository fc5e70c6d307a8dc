"""The Kubernetes job of docs/clusters.md, with the variables that Kubeflow's operator sets in each pod."""

from __future__ import annotations

import pytest
import yaml
from forked_scripts import forked_scripts
from free_ports import free_port
from page_blocks import ROOT, blocks_of, write_files

PAGE = "docs/clusters.md"


@pytest.fixture
def job():
    (block,) = [each for each in blocks_of(ROOT / PAGE) if each.title == "job.yaml"]
    return yaml.safe_load(block.text)


@pytest.mark.slow
def test_the_pods_of_the_kubernetes_job_train_together(job, tmp_path):
    write_files(PAGE, tmp_path)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    world_size = sum(role["replicas"] for role in replicas.values())
    assert (job["kind"], world_size) == ("PyTorchJob", 4)
    scripts = set()
    for role in replicas.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator sets variables in the container of this name
        python, script = container["command"]
        assert python == "python"
        scripts.add(script)
    (script,) = scripts
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with forked_scripts() as running:
        done = running.run(
            tmp_path / script, [[]] * world_size, [{"RANK": str(rank), **shared} for rank in range(world_size)]
        )
    assert set(done.codes) == {0}, done.output
    assert "4 ranks, step 8: loss" in done.output
    assert (tmp_path / "run" / "latest").read_text().strip() == "step-00000008"
