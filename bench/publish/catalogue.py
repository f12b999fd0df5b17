"""Which runs of which scripts the documentation shows: the name of each result and the words that make it."""

from __future__ import annotations

USUAL = (
    "all_reduce",
    "ddp",
    "shards",
    "store",
    "startup",
    "engines",
)  # what `make bench` runs by itself

RUNS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce.py",),
    "ddp": ("ddp.py",),
    "ddp-4-ranks": ("ddp.py", "--ranks", "4"),
    "shards": ("shards.py",),
    "shared_model": ("shared_model.py",),
    "store": ("store.py",),
    "startup": ("startup.py",),
    "engines": ("engines.py",),
    "persistent": ("persistent.py",),
    "plugin": ("plugin.py",),
    "zero": ("zero.py",),
    "hooks": ("hooks.py",),
    "recorder": ("recorder.py",),
    "checks": ("checks.py",),
    "page": ("page.py",),
    "many_workers": ("many_workers.py",),
    "schedules": ("schedules.py",),
    "hosts": ("hosts.py", "--delays", "0"),
    "hosts-delays": ("hosts.py", "--hosts", "2", "--rates", "1gbit", "--delays", "0.1", "20"),
    "hosts-two-ranks": ("hosts.py", "--hosts", "2", "--per-host", "2", "--rates", "none", "1gbit", "--delays", "0"),
    "encryption": ("encryption.py",),
    "death": ("death.py", "--kills", "30"),
    "elastic-death": ("elastic.py", "--cases", "death"),
    "elastic-peers": ("elastic.py", "--cases", "peers", "--kills", "20"),
    "elastic-join": ("elastic.py", "--cases", "join"),
    "elastic-overhead": ("elastic.py", "--cases", "overhead", "shards"),
    "elastic-frozen": ("elastic.py", "--cases", "frozen", "partition"),
    "elastic-coordinator": ("elastic.py", "--cases", "coordinator"),
    "elastic-speeds": ("elastic.py", "--cases", "speeds"),
    "elastic-thin": ("elastic.py", "--cases", "thin"),
    "verdicts-quick": ("verdicts.py", "--runs", "3", "--faults", "raise", "kill", "--healthy", "0"),
}
