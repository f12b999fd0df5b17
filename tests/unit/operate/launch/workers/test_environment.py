"""The environment of a worker: torchrun's variables, and the share of cores."""

from __future__ import annotations

import pytest

from paceline.cli.main import main
from paceline.operate.launch.workers.environment import (
    allowed_cores,
    check_variables,
    misspelled,
    threads_per_worker,
    worker_environment,
)


def test_cores_are_shared_unless_the_user_has_chosen():
    assert threads_per_worker(8, 2, {}) == 4
    assert threads_per_worker(2, 3, {}) == 1
    assert threads_per_worker(8, 2, {"OMP_NUM_THREADS": "3"}) is None
    assert allowed_cores() >= 1


def test_workers_find_torchruns_variables():
    found = worker_environment(1, 4, 29500, "id")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "1", "4", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "29500", "id")


WRONG = [
    ("PACELINE_ALGORITHM", "fastest", "the algorithm is 'fastest' (an argument, or PACELINE_ALGORITHM)"),
    ("PACELINE_CHECKS", "often", "PACELINE_CHECKS is 'often'; it must be on, off, or"),
    ("PACELINE_COMPAT", "mpi", "PACELINE_COMPAT: 'mpi' is not a library that Paceline can replace"),
    ("PACELINE_COSTS", "cheap", "PACELINE_COSTS is 'cheap'; it must be JSON like"),
    ("PACELINE_INSECURE", "yes", "PACELINE_INSECURE is 'yes'; it must be 1 or 0"),
    (
        "PACELINE_NETWORK",
        '{"nodes": 3}',
        """PACELINE_NETWORK is '{"nodes": 3}': """,
    ),
    ("PACELINE_PORT", "0", "PACELINE_PORT is '0'; it must be a port from 1 to 65535"),
    ("PACELINE_RECORD", "false", "PACELINE_RECORD is 'false'; it must be on or off"),
    ("PACELINE_SECURITY", "tls", "PACELINE_SECURITY is 'tls'; it must be one of auth, encrypt, none"),
    ("PACELINE_STREAMS", "99", "PACELINE_STREAMS is '99'; it must be a number from 1 to 64"),
]

RIGHT = {
    "PACELINE_ALGORITHM": "ring",
    "PACELINE_CHECKS": "10",
    "PACELINE_COMPAT": "torch,horovod",
    "PACELINE_COSTS": '{"within_host": [2e-6, 1e-10], "between_hosts": [3e-5, 5e-10], "gamma": 1e-10}',
    "PACELINE_INSECURE": "1",
    "PACELINE_NETWORK": '{"node": "1gbit,0.1ms", "pairs": {"0-7": "100mbit,0.1ms"}}',
    "PACELINE_PORT": "29500",
    "PACELINE_RECORD": "off",
    "PACELINE_SECURITY": "encrypt",
    "PACELINE_STREAMS": "4",
    "PACELINE_CONGESTION": "cubic",
    "PACELINE_IFACE": "lo",
}


@pytest.mark.parametrize(("name", "value", "said"), WRONG, ids=[each[0] for each in WRONG])
def test_a_wrong_value_ends_the_launcher_in_one_line(monkeypatch, capsys, tmp_path, name, value, said):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no worker must start')")
    monkeypatch.setenv(name, value)
    assert main(["run", "--nproc-per-node", "4", str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline run: {said}")


COSTS = '{"within_host": %s, "between_hosts": [1, 2], "gamma": %s}'
HOSTILE = {
    "PACELINE_COSTS": [
        COSTS % ("[1, 2]", "NaN"), COSTS % ("[-1, 2]", "1"), COSTS % ('["a", "b"]', "1"), COSTS % ('"ab"', "1"),
        COSTS % ("[true, 1]", "1"), COSTS % ("[1e999, 1]", "1"), COSTS % ("[null, 1]", "1"), "[" * 3000,
    ],
    "PACELINE_NETWORK": [
        '{"nodes": {"-1": "1gbit"}}', '{"nodes": {"%s": "1gbit"}}' % ("9" * 5000), '{"pairs": {"0-0": "1gbit"}}',
        '{"pairs": {"0": "1gbit"}}', '{"groups": {"r": [["a"], "1gbit"]}}', '{"node": "1e999gbit"}', "[" * 3000,
    ],
    "PACELINE_STREAMS": ["0", "-1", "1.5", "\u0663", "9" * 5000],
    "PACELINE_PORT": ["-1", "\u0663\u0663", "9" * 5000],
    "PACELINE_NODES": ["0", "-1", "x", "9" * 5000],
    "PACELINE_FAILPOINTS": ["x", "0:batch.begun@1=x", "0:nowhere@1=kill"],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_numbers_out_of_range_are_refused_by_name(monkeypatch, name):
    for value in HOSTILE[name]:
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"^{name} "):
            check_variables(False)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PACELINE_IFACE", "eth77", "has no interface 'eth77'"),
        ("PACELINE_CONGESTION", "lightspeed", "PACELINE_CONGESTION is 'lightspeed', which this kernel rejects"),
    ],
)
def test_what_several_machines_need_is_checked_there(name, value, said):
    check_variables(False, {name: value})
    with pytest.raises(ValueError, match=said):
        check_variables(True, {name: value})


def test_right_values_pass(monkeypatch):
    for name, value in RIGHT.items():
        monkeypatch.setenv(name, value)
    check_variables(True)


def test_a_misspelled_name_is_pointed_out():
    names = ("PACELINE_CHEKS", "PACELINE_STREAM", "PACELINE_STORE", "PACELINE_CHECKS", "PACELINE_MY_OWN", "PATH")
    assert list(misspelled(dict.fromkeys(names, "1"))) == [
        f"the environment variable {seen} is not known and has no effect; did you mean {meant}?"
        for seen, meant in (("PACELINE_CHEKS", "PACELINE_CHECKS"), ("PACELINE_STREAM", "PACELINE_STREAMS"))
    ]


def test_every_variable_in_the_sources_is_known():
    import re
    from pathlib import Path

    import paceline
    from paceline.operate.launch.workers import environment

    found = set()
    for path in Path(paceline.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r'"PACELINE_([A-Z_]+)"', path.read_text()))
    named = {*environment._CHECKS, *environment._BETWEEN_MACHINES}
    known = {name.removeprefix("PACELINE_") for name in named} | set(environment._OF_WORKERS)
    assert found == known
