"""Output and exit codes of the four `paceline checkpoint` commands."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys

import pytest
import torch
from checkpoint_states import save

import paceline.cli.checkpoints
from paceline.cli.main import main
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import whole
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.storage import ProgressPrinter


@pytest.fixture
def command(capsys):
    def run(*words: object) -> tuple[int, str]:
        code = main(["checkpoint", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_the_checkpoints_of_a_directory_are_listed(tmp_path, command):
    root = Root(tmp_path)
    save(root, 1)
    save(root, 2)
    os.truncate(tmp_path / "step_0000000001" / "rank_00000_000.safetensors", 9)
    code, text = command("inspect", tmp_path)
    first, second = text.splitlines()
    assert (
        code == 0 and first.startswith("step_0000000002") and "step 2" in first and first.endswith("whole  <- latest")
    )
    assert "DAMAGED" in second and "rank_00000_000.safetensors has 9 bytes instead of" in second
    code, text = command("inspect", tmp_path, "--json")
    assert json.loads(text)["latest"] == "step_0000000002"


def test_what_a_checkpoint_holds_is_listed(tmp_path, command):
    save(Root(tmp_path), 7)
    code, text = command("inspect", tmp_path / "step_0000000007")
    assert code == 0 and "step 7, saved 2" in text and "by 2 ranks" in text and "3 tensors in 4 files" in text
    assert any(
        line.split() == ["model/weight", "F32", "6", "x", "50", "1.2", "kB", "2", "pieces"]
        for line in text.splitlines()
    )
    assert "  step = 7" in text.splitlines()
    code, text = command("inspect", tmp_path / "step_0000000007", "--json")
    assert json.loads(text)["tensors"]["model/bias"] == {"dtype": "I64", "shape": [3], "pieces": 1}


def test_verify_names_what_is_damaged_and_what_is_left(tmp_path, command):
    root = Root(tmp_path)
    save(root, 1)
    save(root, 2)
    assert command("verify", tmp_path)[0] == 0
    file = tmp_path / "step_0000000002" / "rank_00001_001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, text = command("verify", tmp_path)
    assert code == 1 and f"DAMAGED: {file} was changed: bytes" in text
    assert text.splitlines()[-1] == f"restoring would use {tmp_path}/step_0000000001"
    assert command("verify", tmp_path / "step_0000000001")[0] == 0
    assert command("verify", tmp_path / "none")[0] == 2


def test_diff_finds_tensors_and_values_that_differ(tmp_path, command):
    root = Root(tmp_path)
    for step in (1, 2):
        save(root, step)
    one, two = tmp_path / "step_0000000001", tmp_path / "step_0000000002"
    code, text = command("diff", one, two)
    assert code == 1 and text.splitlines() == [
        "model/bias: 3 of 3 elements differ, by up to 1",
        "model/weight: 300 of 300 elements differ, by up to 1",
        "optimizer/avg: 300 of 300 elements differ, by up to 1",
        "step: 1 and 2",
    ]
    assert command("diff", one, one)[0] == 0
    assert command("diff", one, two, "--only", "optimizer")[1].count("\n") == 1
    assert command("diff", one, tmp_path / "none")[0] == 2


def model_checkpoint(directory, tensors: dict[str, torch.Tensor], kinds: dict[torch.dtype, str]) -> None:
    root = Root(directory)
    draft = root.begin(1)
    pieces = [
        WriteItem(
            f"model/{name}",
            kinds[each.dtype],
            tuple(each.shape),
            whole(tuple(each.shape)),
            bytes(each.view(torch.uint8).flatten().tolist()),
        )
        for name, each in tensors.items()
    ]
    root.publish(draft, [write_part(root.storage, draft, 0, pieces)], None, world_size=1)


def test_an_exported_model_is_read_by_safetensors(tmp_path, command):
    torchs = pytest.importorskip("safetensors.torch")
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    model_checkpoint(tmp_path / "run", tensors, {torch.float32: "F32", torch.bfloat16: "BF16"})
    code, text = command("export", tmp_path / "run", tmp_path / "model.safetensors")
    assert code == 0 and "2 tensors" in text
    read = torchs.load_file(tmp_path / "model.safetensors")
    assert sorted(read) == ["b", "w"] and all(torch.equal(read[name], each) for name, each in tensors.items())
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "run"]
    code, text = command("diff", tmp_path / "run", tmp_path / "model.safetensors")
    assert code == 1 and "only in" in text
    code, text = command("export", tmp_path / "run", tmp_path / "x", "--only", "ema")
    assert code == 2 and "contains no tensors in 'ema'; it contains model" in text


def test_foreign_files_are_shown_and_compared(tmp_path, command):
    torch.save({"model": {"w": torch.ones(2), "v": torch.zeros(3)}, "epoch": 3}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.ones(2) + 2, "v": torch.zeros(4)}, "epoch": 3}, tmp_path / "b.pt")
    code, text = command("inspect", tmp_path / "a.pt")
    assert code == 0 and "a.pt (a torch.save file): 2 tensors" in text and "  epoch = 3" in text
    code, text = command("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1 and text.splitlines() == [
        "model/v: float32 [3] and float32 [4]",
        "model/w: 2 of 2 elements differ, by up to 2",
    ]


def test_a_place_without_checkpoints_is_said_to_be_one(tmp_path, command):
    for action in (["inspect"], ["verify"], ["export", "x"]):
        assert command(action[0], tmp_path, *action[1:])[0] == 2


def test_inspect_verify_and_export_need_no_torch(tmp_path):
    save(Root(tmp_path / "run"), 1)
    program = (
        "import sys; sys.modules['torch'] = None; from paceline.cli.main import main\n"
        f"run = {str(tmp_path / 'run')!r}\n"
        "codes = [main(['checkpoint', *words]) for words in (['inspect', run], ['verify', run], "
        f"['export', run, {str(tmp_path / 'x.safetensors')!r}])]\n"
        "sys.exit(max(codes))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_long_work_says_how_far_it_is(capsys):
    times = iter((0.0, 1.0, 6.0, 7.0))
    progress = ProgressPrinter("rank 0 wrote", clock=lambda: next(times))
    for done in (10**9, 3 * 10**9, 4 * 10**9):
        progress(done, 12 * 10**9)
    assert capsys.readouterr().err == "rank 0 wrote 3.0 GB of 12.0 GB (25%, 500.0 MB/s, 18 s to go)\n"


def test_the_examples_in_docstrings_run():
    for module in (paceline.cli.checkpoints, paceline.cli.checkpoints):
        assert doctest.testmod(module).failed == 0


def test_names_in_files_cannot_control_the_terminal(tmp_path, command):
    torch.save({"\x1b]0;x\x07\nstep_0000000009: intact": torch.ones(2), "\u202e\x9b2J": 1}, tmp_path / "m.pt")
    torch.save({}, tmp_path / "empty.pt")
    for words in (["inspect", tmp_path / "m.pt"], ["diff", tmp_path / "m.pt", tmp_path / "empty.pt"]):
        _, text = command(*words)
        assert all(char.isprintable() or char == "\n" for char in text)
        assert r"\x1b]0;x\x07\nstep_0000000009: intact" in text and r"\u202e" in text
        assert not any(line.startswith("step_0000000009") for line in text.splitlines())


def test_directories_with_other_names_are_listed(tmp_path, command):
    os.mkdir(os.fsencode(tmp_path) + b"/.writing-\xff\x1b[2J")
    code, text = command("inspect", tmp_path)
    assert code == 0 and text.startswith(r".writing-\udcff\x1b[2J  was not finished")


def test_tensors_without_dense_data_are_not_compared(tmp_path, command):
    kinds = {
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "without data": torch.empty(3, device="meta"),
    }
    torch.save(kinds, tmp_path / "m.pt")
    code, text = command("diff", tmp_path / "m.pt", tmp_path / "m.pt")
    assert code == 1 and text.splitlines() == [f"{kind}: not compared, because it is {kind}" for kind in sorted(kinds)]


def test_a_tensor_that_memory_cannot_hold_is_not_compared(tmp_path, command):
    torch.save({"w": torch.ones(1).expand(1 << 50)}, tmp_path / "m.pt")
    code, text = command("diff", tmp_path / "m.pt", tmp_path / "m.pt")
    assert code == 2 and text.startswith("paceline checkpoint diff: the tensor w could not be compared: ")


def test_a_link_to_itself_is_reported_in_one_line(tmp_path, command):
    (tmp_path / "loop").symlink_to("loop")
    code, text = command("inspect", tmp_path / "loop")
    assert (
        code == 2 and text.startswith("paceline checkpoint inspect: ") and "Too many levels of symbolic links" in text
    )
    assert len(text.splitlines()) == 1
