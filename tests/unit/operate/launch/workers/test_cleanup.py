"""The location and the requirements of a job's cgroup, on simulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.operate.launch.workers.cleanup import Cgroup, own_directory

V2 = "31 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n40 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n"
PART = "31 24 0:27 /user.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
NAMESPACED = "31 24 0:27 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def _machine(root: Path, membership: str, mounts: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


@pytest.mark.parametrize(
    ("membership", "mounts", "directory"),
    [
        ("0::/user.slice/a.scope\n", V2, "sys/fs/cgroup/user.slice/a.scope"),
        ("4:memory:/job\n0::/\n", HYBRID, "sys/fs/cgroup/unified"),
        ("0::/user.slice/a.scope\n", PART, "sys/fs/cgroup/a.scope"),
        ("0::/system.slice\n", PART, None),
        ("0::/x\n", NAMESPACED, None),
        ("4:memory:/job\n", V2, None),
        ("0::/\n", "", None),
    ],
)
def test_the_own_cgroup_is_found_by_its_mount(tmp_path, membership, mounts, directory):
    expected = tmp_path / directory if directory is not None else None
    assert own_directory(_machine(tmp_path, membership, mounts)) == expected


def test_without_a_way_to_kill_it_there_is_none(tmp_path):
    """Linux before 5.14 cannot kill all processes in a cgroup at once."""
    machine = _machine(tmp_path, "0::/\n", V2)
    own = machine / "sys/fs/cgroup"
    own.mkdir(parents=True)
    (own / "cgroup.procs").touch()
    cgroup = Cgroup.planned(machine)
    assert cgroup is not None
    assert not cgroup.make()
    assert [each.name for each in own.iterdir()] == ["cgroup.procs"]


def test_where_processes_cannot_be_moved_there_is_none(tmp_path):
    machine = _machine(tmp_path, "0::/\n", V2)
    (machine / "sys/fs/cgroup").mkdir(parents=True)
    assert Cgroup.planned(machine) is None
