"""Draws the terminal pictures of docs/launcher.md from real runs: success, a crash, an out-of-memory kill and Ctrl-C.

    python docs/pictures/launcher.py

Each run has its own terminal, so colors and Ctrl-C work as usual. The name of the host is replaced. The out-of-memory
kill requires permission to create a memory cgroup; without it, that picture is not updated.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from terminal import render

TRAIN = """
import time, torch
import paceline as dist

dist.init_process_group()
model = dist.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    loss = model(torch.randn(32, 64)).square().mean()
    {trouble}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {{step:3d}}  loss {{loss.item():.3f}}", flush=True)
    time.sleep({pause})
"""
CRASH = 'if step == 12 and dist.get_rank() == 1: raise ValueError(f"loss is {loss.item():.3f} at step {step}")'
GREEDY = "if dist.get_rank() == 1 and step > 8: hoard = [bytearray(os.urandom(8 << 20)) for _ in range(400)]"
LIMIT_MIB = 900
MEMORY = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Scene:
    name: str
    steps: int = 21
    trouble: str = "pass"
    pause_s: float = 0.0
    interrupt: bool = False
    limit_mib: int | None = None


SCENES = (
    Scene("good-run"),
    Scene("crash", trouble=CRASH),
    Scene("out-of-memory", trouble=GREEDY, limit_mib=LIMIT_MIB),
    Scene("ctrl-c", steps=1000, pause_s=0.02, interrupt=True),
)


def main() -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        for scene in SCENES:
            text = TRAIN.format(steps=scene.steps, trouble=scene.trouble, pause=scene.pause_s)
            Path(directory, "train.py").write_text(("import os" if "os." in text else "") + text)
            shown = play(scene, directory)
            if shown is not None:
                command = "$ paceline run --nproc-per-node 2 train.py\n"
                shown = shown.replace(socket.gethostname(), "node0").replace(directory, "~")
                (here / f"{scene.name}.svg").write_text(render(command + shown, f"paceline run: {scene.name}"))
                print(f"{scene.name}.svg")


def play(scene: Scene, directory: str) -> str | None:
    """Returns the contents of the terminal, or None if the scene cannot be run on this machine."""
    words = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", "train.py"]
    with contextlib.ExitStack() as cleanup:
        if scene.limit_mib is not None:
            cgroup = MEMORY / f"paceline-picture-{os.getpid()}"
            try:
                cgroup.mkdir()
                cleanup.callback(cgroup.rmdir)
                (cgroup / "memory.limit_in_bytes").write_text(str(scene.limit_mib << 20))
            except OSError as error:
                print(f"{scene.name}: no memory cgroup can be created ({error})")
                return None
            words = ["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; exec {shlex.join(words)}"]
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(directory)
            os.environ.pop("OMP_NUM_THREADS", None)
            os.execvp(words[0], words)
        shown = _watch(terminal, scene.interrupt)
        os.close(terminal)
        os.waitpid(pid, 0)
        time.sleep(0.2)  # until the cgroup is empty
        return shown.decode().replace("\r\n", "\n")


def _watch(terminal: int, interrupt: bool) -> bytes:
    shown = b""
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):  # EIO when the program has exited
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                more = os.read(terminal, 4096)
                if not more:
                    break
                shown += more
            if interrupt and shown.count(b"step  20") == 2:
                os.write(terminal, b"\x03")
                interrupt = False
    return shown


if __name__ == "__main__":
    main()
