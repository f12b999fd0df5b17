"""Error messages for mistyped command lines: one or two lines that suggest the correct form."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from paceline.cli.main import COMMANDS, main, parser
from paceline.operate.launch.flags import flags_after_script


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["train.py"], "paceline run train.py"),
        (["--nproc-per-node", "2", "my script.py"], "paceline run --nproc-per-node 2 'my script.py'"),
        (["rnu", "train.py"], "paceline run"),
        (["docter"], "paceline doctor"),
    ],
)
def test_a_missing_command_is_suggested(capsys, words, suggested):
    first, second = complaint(capsys, *words)
    assert first == f"paceline: {words[0]} is not a command; did you mean `{suggested}`?"
    assert second == "See `paceline --help` for all commands."


def test_no_command_at_all_names_them(capsys):
    assert complaint(capsys)[0] == f"paceline: a command is missing: {', '.join(COMMANDS)}"


def test_the_commands_are_those_of_the_grammar():
    choices = next(action.choices for action in parser({})._actions if action.dest == "command")
    assert tuple(choices) == COMMANDS


@pytest.mark.parametrize(
    ("words", "seen", "meant"),
    [
        (["run", "--nprocs-per-node", "2", "x.py"], "--nprocs-per-node", "--nproc-per-node"),
        (["run", "--nproc_per_nodes=2", "x.py"], "--nproc_per_nodes", "--nproc-per-node"),
        (["doctor", "--lisen"], "--lisen", "--listen"),
    ],
)
def test_the_nearest_flag_is_suggested(capsys, words, seen, meant):
    first, second = complaint(capsys, *words)
    assert first == f"paceline {words[0]}: {seen} is not a flag; did you mean {meant}?"
    assert second == f"See `paceline {words[0]} --help` for all flags."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--qqqq", "x.py"], "paceline run: --qqqq is not a flag"),
        (["run"], "paceline run: the following arguments are required: SCRIPT"),
        (["run", "--max-restarts", "often", "x.py"], "'often' is not a number of at least 0"),
    ],
)
def test_a_flag_error_is_two_lines(capsys, words, said):
    lines = complaint(capsys, *words)
    assert len(lines) == 2
    assert said in lines[0]


def test_a_reader_that_leaves_ends_a_command_silently():
    words = [sys.executable, "-m", "paceline", "launch-script", "slurm", "train.py"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        command.stdout.close()
        complaint = command.stderr.read()
        assert command.wait(60) == 128 + signal.SIGPIPE
    assert complaint == ""


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def waits(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.recordings.show_runs", waits)
    assert main(["runs"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


def test_another_broken_pipe_is_an_error(capfd, monkeypatch):
    def broken(options):
        raise BrokenPipeError("the connection to the other machine")

    monkeypatch.setattr("paceline.cli.recordings.show_runs", broken)
    with pytest.raises(BrokenPipeError, match="the other machine"):
        main(["runs"])


def test_an_unreadable_file_is_reported_in_one_line(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"paceline plan: {tmp_path}/none.json: No such file or directory\n"


def test_output_to_a_full_disk_is_reported_in_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        code = [sys.executable, "-m", "paceline", "checkpoint", "inspect", str(tmp_path)]
        (tmp_path / ".writing-step").mkdir()
        ended = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == "paceline checkpoint: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--versoin", "--versoin is not a flag; did you mean `paceline --version`?"),
        ("--hepl", "--hepl is not a flag; did you mean `paceline --help`?"),
        ("--qqqq", "--qqqq is not a flag"),
        ("-", "- is not a flag"),
        ("--nproc=2", "--nproc=2 is not a command; did you mean `paceline run --nproc=2`?"),
    ],
)
def test_a_flag_in_place_of_a_command_is_understood(capsys, word, said):
    assert complaint(capsys, word)[0] == f"paceline: {said}"


@pytest.mark.parametrize("word", ["--nproc", "--nproc-per", "--nproc_per", "--nproc_per_node", "--nproc-per-node"])
def test_the_beginning_of_a_flag_is_enough(word):
    assert parser({}).parse_args(["run", word, "2", "x.py"]).nproc_per_node == 2


def test_a_beginning_of_several_flags_is_ambiguous(capsys):
    (first, _) = complaint(capsys, "run", "--rdzv", "a", "x.py")
    assert "ambiguous option: --rdzv could match --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf" in first


@pytest.mark.parametrize("word", ["--r=16", "--r", "--lo=3", "--c=1", "--n", "-tx", "--nproc-per-node=4"])
@pytest.mark.parametrize("command", [["run"], ["launch-script", "slurm"]])
def test_a_script_gets_words_like_abbreviated_flags(command, word):
    options = parser({}).parse_args([*command, "--nproc-per-node", "2", "x.py", "a", word, "8"])
    assert (options.nproc_per_node in (2, "2"), options.script, options.args) == (True, "x.py", ["a", word, "8"])


@pytest.mark.parametrize(
    ("text", "words", "flags"),
    [
        ("", ["--nproc-per-node", "2", "--nnodes=3", "--lr", "1"], "--nproc-per-node, --nnodes"),
        ("", ["--nproc_per_node=2", "--nproc_per_node=2"], "--nproc_per_node"),
        ('parser.add_argument("--log-dir")', ["--log-dir", "x"], None),
        ("parse(log_dir=None)", ["--log-dir", "x"], None),
        ("", ["--", "--nnodes", "2"], None),
        ("", ["--lr", "0.1", "-m", "x", "nnodes"], None),
    ],
)
def test_flags_behind_the_script_are_pointed_out(tmp_path, text, words, flags):
    script = tmp_path / "train.py"
    script.write_text(text)
    said = list(flags_after_script(str(script), words))
    assert len(said) == (flags is not None)
    assert all(
        each.startswith(
            f"the script receives {flags}, although the launcher has flags with these names: put the launcher's flags "
            "before the script"
        )
        for each in said
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "pass one calibration file, which `paceline plan --measure -- train.py` writes"),
        (["plan", "nosuch.json"], "nosuch.json: No such file or directory"),
        (["plan", "--measure"], "the script to measure follows the flags"),
        (["plan", "--measure", "nosuch.py"], "nosuch.py is not a readable file"),
        (["run", "nosuch.py"], "nosuch.py does not exist; pass the path of a script"),
        (["top", "nosuch"], "nosuch is neither the directory of a job nor the address of a page"),
        (["checkpoint", "inspect", "nosuch"], "nosuch does not exist, or is not a checkpoint and contains none"),
        (["checkpoint", "export", "nosuch", "o"], "nosuch contains no complete checkpoint"),
    ],
)
def test_a_missing_file_is_named_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith(f"paceline {words[0]}") and error.count("\n") == 1
