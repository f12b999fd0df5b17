"""Assignment of workers to cores and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.operate.launch.workers.placement import (
    assign,
    cores_of_workers,
    count_gpus,
    device_of,
    domains_of,
    format_cpulist,
    numa_node_of_gpu,
    parse_cpulist,
    siblings_of,
    variables_of_gpu,
    visible_devices,
)


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cores_reads_back(cores):
    assert frozenset(parse_cpulist(format_cpulist(cores))) == cores


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 20), st.booleans(), st.data())
def test_sets_are_disjoint_none_is_empty_and_none_crosses_nodes(sizes, workers, threads, data):
    first = [sum(sizes[:at]) for at in range(len(sizes))]
    domains = [tuple(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    step = 2 if threads else 1
    siblings = [domain[at : at + step] for domain in domains for at in range(0, len(domain), step)]
    wishes = data.draw(st.lists(st.none() | st.integers(0, len(sizes) - 1), max_size=workers))
    placed = assign(domains, siblings, workers, wishes)
    if workers > sum(sizes):
        assert placed is None
        return
    assert len(placed) == workers
    used = [core for cores in placed for core in cores]
    assert len(used) == len(set(used))
    assert all(any(set(cores) <= set(domain) for domain in domains) and cores for cores in placed)


def test_workers_are_spread_over_the_nodes_and_get_whole_cores():
    domains = [tuple(range(8)), tuple(range(8, 16))]
    siblings = [(core, core + 4) for start in (0, 8) for core in range(start, start + 4)]
    assert assign(domains, siblings, 2) == [tuple(range(8)), tuple(range(8, 16))]
    assert assign(domains, siblings, 4) == [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]


def test_a_worker_is_next_to_its_gpu():
    assert assign([(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], 2, [1, 0]) == [(2, 3), (0, 1)]


@pytest.fixture
def system(tmp_path) -> Path:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")

    write("node/node0/cpulist", "0-3")
    write("node/node1/cpulist", "4-7")
    for core in range(8):
        pair = core // 2 * 2
        write(f"cpu/cpu{core}/topology/thread_siblings_list", f"{pair}-{pair + 1}")
        write(f"cpu/cpu{core}/topology/package_cpus_list", "0-7")
        write(f"cpu/cpu{core}/cache/index3/shared_cpu_list", "0-1" if core < 2 else "2-7")
    return tmp_path


def test_the_machine_is_read_from_sys(system):
    assert domains_of("node", range(8), system) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert domains_of("node", [1, 2, 5], system) == [(1, 2), (5,)]
    assert domains_of("socket", range(8), system) == [tuple(range(8))]
    assert domains_of("core-complex", range(8), system) == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert siblings_of(range(4), system) == [(0, 1), (2, 3)]


def test_binding_modes(system):
    assert cores_of_workers("exclusive", 4, 0, range(8), system) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cores_of_workers("node", 2, 0, range(8), system) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cores_of_workers("exclusive", 9, 0, range(8), system) is None


def quota_in(root: Path, membership: str, **limits: str) -> float:
    """Creates the files that describe a process in a cgroup and returns the quota; `limits` maps paths to contents."""
    files = {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return _core.cpu_quota(str(root))[0]


def test_quotas_are_those_of_the_own_cgroup_and_its_parents(tmp_path):
    assert _core.cpu_quota(str(tmp_path))[0] == 0
    mine = "0::/job/step\n"
    assert quota_in(tmp_path, mine, **{"cpu.max": "100000 100000\n"}) == 1  # a container may see its cgroup as the root
    assert quota_in(tmp_path, mine, **{"cpu.max": "max 100000\n", "job/cpu.max": "200000 100000\n"}) == 2
    assert quota_in(tmp_path, mine, **{"job/step/cpu.max": "50000 100000\n"}) == 0.5
    assert _core.cpu_quota(str(tmp_path))[1] == (tmp_path / "sys/fs/cgroup/job/step").stat().st_ino


def test_quotas_of_cgroups_of_version_1(tmp_path):
    mine = "3:cpu,cpuacct:/job\n0::/\n"
    period = {"cpu/cpu.cfs_period_us": "100000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    assert quota_in(tmp_path, mine, **period, **{"cpu/cpu.cfs_quota_us": "-1\n"}) == 0
    assert quota_in(tmp_path, mine, **{"cpu/job/cpu.cfs_quota_us": "150000\n"}) == 1.5


def test_gpus_are_counted_as_the_driver_shows_them(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == ["0"]
    assert [device_of(rank, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 2) for rank in range(2)] == ["GPU-a", "GPU-b"]
    assert device_of(3, {}, 2) == "1"
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,7,1"}, tmp_path) == 1, "the driver ends the list at a missing GPU"
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "7"}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1,0"}, tmp_path) == 0, "the driver refuses a repeated GPU"
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, tmp_path) == 1, "a process uses one part of a GPU"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({"HIP_VISIBLE_DEVICES": "4,5"}, {"HIP_VISIBLE_DEVICES": "5"}),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, {"ROCR_VISIBLE_DEVICES": "5"}),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "4,5"},
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
        ),
    ],
)
def test_a_worker_sees_only_its_own_gpu(given, expected):
    assert variables_of_gpu(1, given, 2) == expected


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_gpus_of_wsl_are_those_that_its_nvidia_smi_lists(tmp_path):
    write(tmp_path, "dev/dxg", "")
    assert count_gpus({}, tmp_path) == 0, "a machine without NVIDIA's driver"
    smi = write(
        tmp_path, "usr/lib/wsl/lib/nvidia-smi", "#!/bin/sh\necho 'GPU 0: A (UUID: 1)'\necho 'GPU 1: B (UUID: 2)'\n"
    )
    smi.chmod(0o755)
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1
    smi.write_text("#!/bin/sh\necho GPU access blocked by the operating system\nexit 255\n")
    assert count_gpus({}, tmp_path) == 0


def test_amds_gpus_are_those_of_the_driver_that_a_container_has(tmp_path):
    write(tmp_path, "dev/kfd", "")
    for minor in (128, 129, 131):  # 131 supports rendering, not computing
        write(tmp_path, f"dev/dri/renderD{minor}", "")
    assert count_gpus({}, tmp_path) == 3
    for node, simds, minor in ((0, 0, 0), (1, 440, 128), (2, 440, 129), (3, 440, 130)):
        text = f"cpu_cores_count 0\nsimd_count {simds}\ndrm_render_minor {minor}\n"
        write(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}/properties", text)
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"HIP_VISIBLE_DEVICES": "1"}, tmp_path) == 1


def test_ascends_devices_have_their_own_variable(tmp_path):
    for name in ("davinci0", "davinci1", "davinci2", "davinci_manager"):
        write(tmp_path, f"dev/{name}", "")
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({"ASCEND_RT_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert variables_of_gpu(1, {}, 3, tmp_path) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert variables_of_gpu(1, {"ASCEND_RT_VISIBLE_DEVICES": "0,2"}, 2) == {"ASCEND_RT_VISIBLE_DEVICES": "2"}


def test_the_gpus_numa_node_is_found(tmp_path):
    for name, text in (
        ("proc/driver/nvidia/gpus/0000:AB:00.0/information", "Model: x\nGPU UUID: \t GPU-5ab\nDevice Minor: \t 0\n"),
        ("proc/driver/nvidia/gpus/0000:2B:00.0/information", "Model: x\nGPU UUID: \t GPU-4cd\nDevice Minor: \t 5\n"),
        ("sys/bus/pci/devices/0000:ab:00.0/numa_node", "1\n"),
        ("sys/bus/pci/devices/0000:2b:00.0/numa_node", "0\n"),
    ):
        write(tmp_path, name, text)
    assert [numa_node_of_gpu(device, tmp_path) for device in ("0", "1", "2")] == [0, 1, None]
    assert [numa_node_of_gpu(device, tmp_path) for device in ("GPU-5ab", "GPU-4", "MIG-5ab", "")] == [1, 0, None, None]
