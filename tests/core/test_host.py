from unittest import mock

import torch.distributed as dist

from booster_core.ranks import store as store_module
from booster_core.ranks.environments import Environment
from booster_core.ranks.store import Host, distinct_names, hosts_of, local_rank_of, meet_at_launch, this_host


def test_this_host_stays_the_same():
    assert this_host() == this_host()
    for host in (this_host(), Host("node")):  # of which a system tells nothing but a name
        assert Host.from_text(host.to_text()) == host


def test_hosts_of_one_name_are_numbered():
    a, b, other = Host("node", "1", "net", "mnt"), Host("node", "2", "net", "mnt"), Host("gate", "3", "net", "mnt")
    assert distinct_names([a, b, a, other, b]) == ["node (1)", "node (2)", "node (1)", "gate", "node (2)"]
    assert distinct_names([a, a, other]) == ["node", "node", "gate"]


def test_containers_of_one_machine_are_hosts_of_their_own_with_the_same_devices():
    a, b = Host("node", "1", "net:[1]", "mnt:[1]"), Host("node", "1", "net:[2]", "mnt:[2]")
    assert a != b
    assert a.machine == b.machine


def test_local_ranks_are_counted_by_machine_with_one_request(monkeypatch):
    inner = dist.HashStore()
    store = mock.Mock(wraps=inner)
    machines = [Host(f"node{rank // 8 % 2}", "1", f"net:[{rank}]") for rank in range(64)]
    for rank in reversed(range(64)):  # whoever comes first
        monkeypatch.setattr(store_module, "this_host", lambda rank=rank: machines[rank])
        monkeypatch.setattr(store_module.Meeting, "meet", lambda *_, **__: None)
        inner.set("settings", '{"world_size": 64}')
        meet_at_launch(inner, Environment(rank, 64, None, "localhost", 29500), 1.0, {})
    for rank in range(64):
        store.reset_mock()
        monkeypatch.setattr(store_module, "this_host", lambda rank=rank: machines[rank])
        assert local_rank_of(store, rank) == rank // 16 * 8 + rank % 8
        assert [name for name, *_ in store.mock_calls] == ["get"]
    store.reset_mock()
    assert hosts_of(store, range(64)) == machines
    assert [name for name, *_ in store.mock_calls] == ["multi_get"]
