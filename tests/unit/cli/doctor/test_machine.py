"""The doctor's findings about a machine, and about the path between two machines."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from paceline.cli.doctor import Severity, machine
from paceline.cli.main import main


def test_every_check_finds_something_to_say_here(capsys):
    main(["doctor", "--json"])
    told = {each["about"] for each in json.loads(capsys.readouterr().out)}
    expected = {"versions", "cores", "memory", "/dev/shm", "file descriptors", "interfaces", "ports", "clock"}
    assert expected <= told


def test_what_is_not_good_has_a_reason_and_a_fix():
    for each in machine.check_machine():
        assert each.level is Severity.GOOD or (each.reason and each.fix), each


def test_a_check_that_cannot_look_says_so(monkeypatch):
    def blind():
        raise PermissionError("no")

    monkeypatch.setattr(machine, "CHECKS", (blind,))
    assert [each.seen for each in machine.check_machine()] == ["could not be checked (no)"]


def test_little_shared_memory_is_bad(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    usage = type(machine.shutil.disk_usage("/"))(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    memory, shm = machine.memory(tmp_path)
    assert memory.seen == "4.0 of 8.0 GiB free"
    assert (shm.level, shm.fix.startswith("use docker run --shm-size=8g")) == (Severity.BAD, True)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_interfaces_are_told_with_mtu_and_route(tmp_path, monkeypatch):
    write(tmp_path, "proc/net/route", "Iface\tDestination\nib0\t00000000\t0102A8C0\n")
    for name, state, mtu in (("ib0", "up", "4092"), ("eth9", "down", "1500"), ("lo", "unknown", "65536")):
        write(tmp_path, f"sys/class/net/{name}/operstate", state)
        write(tmp_path, f"sys/class/net/{name}/mtu", mtu)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    interfaces, name = machine.network(tmp_path)
    assert interfaces.seen == "ib0 (MTU 4092); the default route uses ib0"
    assert name.level is Severity.NOTE
    assert "127.0.1.1" in name.seen
