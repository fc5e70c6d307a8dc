from booster_core.ranks.store import Host, distinct_names, this_host


def test_this_host_stays_the_same():
    assert this_host() == this_host()
    assert Host.from_text(this_host().to_text()) == this_host()


def test_a_system_that_tells_nothing_but_a_name():
    assert Host.from_text(Host("node").to_text()) == Host("node")


def test_hosts_of_one_name_are_numbered():
    a, b, other = Host("node", "1", "net", "mnt"), Host("node", "2", "net", "mnt"), Host("gate", "3", "net", "mnt")
    assert distinct_names([a, b, a, other, b]) == ["node (1)", "node (2)", "node (1)", "gate", "node (2)"]
    assert distinct_names([a, a, other]) == ["node", "node", "gate"]


def test_containers_of_one_machine_are_hosts_of_their_own_with_the_same_devices():
    a, b = Host("node", "1", "net:[1]", "mnt:[1]"), Host("node", "1", "net:[2]", "mnt:[2]")
    assert a != b
    assert a.machine == b.machine
