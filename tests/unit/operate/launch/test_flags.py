"""Every flag of `paceline run`: its two spellings, its PET_* variable, its meaning, and its row in docs/launcher.md."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main, parser
from paceline.operate.launch.elastic_options import Chaos, ElasticOptions
from paceline.operate.launch.flags import FLAGS, SHELLS, Flag, completion_script
from paceline.operate.launch.job import CommandKind, Job, endpoint_of, job_of
from paceline.operate.launch.option_types import OptionError, Streams, streams_of
from paceline.operate.launch.workers.environment import allowed_cores

DOCS = Path(__file__).parents[4] / "docs" / "launcher.md"

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1

VALUES = {  # by flag: the text, and the value
    "stall-after": ("4", 4.0),
    "nnodes": ("2:4", (2, 4)),
    "nproc-per-node": ("3", 3),
    "node-rank": ("1", 1),
    "master-addr": ("10.0.0.1", "10.0.0.1"),
    "master-port": ("29400", 29400),
    "local-addr": ("10.0.0.2", "10.0.0.2"),
    "rdzv-backend": ("c10d", "c10d"),
    "rdzv-endpoint": ("h0:29400", "h0:29400"),
    "rdzv-id": ("job7", "job7"),
    "rdzv-conf": ("join_timeout=60,is_host=1", {"join_timeout": "60", "is_host": "1"}),
    "max-restarts": ("3", 3),
    "monitor-interval": ("0.5", 0.5),
    "shutdown-timeout": ("7", 7.0),
    "signals-to-handle": ("SIGTERM,usr1", (TERM, USR1)),
    "start-method": ("fork", "fork"),
    "role": ("trainer", "trainer"),
    "log-dir": ("logs", "logs"),
    "redirects": ("0:1,1:2", {0: Streams.OUT, 1: Streams.ERR}),
    "tee": ("3", {None: Streams.BOTH}),
    "local-ranks-filter": ("0,2", frozenset({0, 2})),
    "log-line-prefix-template": ("${rank}: ", "${rank}: "),
    "duplicate-stdout-filters": ("loss,a,,b", ("loss", "a,b")),
    "duplicate-stderr-filters": ("Error", ("Error",)),
    "event-log-handler": ("console", "console"),
    "numa-binding": ("node", "node"),
    "security": ("encrypt", "encrypt"),
    "stdin": ("none", None),
    "min-workers": ("2", 2),
    "chaos": ("kill:2s,seed=7", Chaos((("kill", 2.0),), 7)),
    "dash-port": ("8080", 8080),
    "port": ("29500", 29500),
    "dash-socket": ("/tmp/page", "/tmp/page"),
    "dash-prefix": ("/proxy/8080", "/proxy/8080"),
    "dash-host": ("hub.example", "hub.example"),
    "compat": ("torch,horovod", ("torch", "horovod")),
    "preload": ("numpy,torch.nn", ("numpy", "torch.nn")),
    "hosts": ("a:4,b:4", "a:4,b:4"),
    "ssh": ("ssh -p 2222", "ssh -p 2222"),
    "remote-python": ("/opt/python", "/opt/python"),
    "remote-dir": ("/job", "/job"),
    "export": ("LR=0.1,COLOR", {"LR": "0.1", "COLOR": None}),
}

REFUSED = {"logs-specs"}

END_AT_ONCE = {"print-completion"}

SWITCHES = [flag for flag in FLAGS if flag.parse is None]


def parse(*arguments: str, environment: dict[str, str] | None = None):
    return parser(environment or {}).parse_args(["run", *arguments, "x.py"])


def job(*arguments: str, environment: dict[str, str] | None = None, script: str = __file__) -> Job:
    return job_of(parser(environment or {}).parse_args(["run", *arguments, script]), environment or {})


def test_one_port_is_for_several_machines():
    several = ("--nnodes=2", "--node-rank=0", "--master-addr=a")
    assert job("--port=29400").one_port is None
    assert job(*several).one_port is None
    assert job(*several, "--port=29400").one_port == 29400
    assert job(*several, environment={"PACELINE_PORT": "29400"}).one_port == 29400
    assert job(*several, "--port=29400").rendezvous.address == ("a", 29400)
    assert job(*several, "--port=29400", "--master-port=29500").rendezvous.address == ("a", 29500)
    assert job("--nnodes=2", "--rdzv-endpoint=a", "--port=29400").rendezvous.address == ("a", 29400)
    with pytest.raises(ValueError, match="PACELINE_PORT is 'many'"):
        job(*several, environment={"PACELINE_PORT": "many"})


def test_launchers_of_one_machine_cannot_share_a_port():
    step = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "4"), ("LOCAL_SIZE", "2"))}
    with pytest.raises(OptionError, match="--port 29400: 2 launchers on each machine cannot share it"):
        job("--port=29400", environment={**step, "MASTER_ADDR": "10.0.0.1"})


def meanings_of(flag: Flag) -> dict[str, object]:
    """Returns the values of the flag for each spelling and for its variable."""
    text, _ = VALUES.get(flag.name, (None, True))
    found = {" ".join(words): parse(*words) for words in [[each, text] if text else [each] for each in flag.spellings]}
    if flag.variable:
        name = f"PET_{flag.dest.upper()}"
        found[f"{name}={text or '1'}"] = parse(environment={name: text or "1"})
        if text is not None:
            both = {name: flag.default or text}
            found[f"--{flag.name} {text} beside {both}"] = parse(f"--{flag.name}", text, environment=both)
    return {written: getattr(arguments, flag.dest) for written, arguments in found.items()}


def test_every_flag_has_two_spellings_and_a_variable():
    flags = [flag for flag in FLAGS if flag.name not in REFUSED | END_AT_ONCE]
    wrong = [
        f"{written} means {meaning!r}"
        for flag in flags
        for written, meaning in meanings_of(flag).items()
        if meaning != VALUES.get(flag.name, (None, True))[1]
    ]
    assert flags and not wrong, "\n".join(["", *wrong])


def test_a_switch_can_be_off_by_its_variable():
    names = {flag.dest: f"PET_{flag.dest.upper()}" for flag in FLAGS if flag.variable and flag.name not in VALUES}
    names = {dest: name for dest, name in names.items() if dest.replace("_", "-") not in REFUSED | END_AT_ONCE}
    values = {name: getattr(parse(environment={name: "0"}), dest) for dest, name in names.items()}
    assert {name: value for name, value in values.items() if value is not False} == {}


def test_every_flag_has_a_row_in_the_docs():
    lines = DOCS.read_text().splitlines()
    rows = {
        flag.name: sum(line.startswith((f"| `--{flag.name}`", f"| `--{flag.name} ")) for line in lines)
        for flag in FLAGS
    }
    wrong = [f"docs/launcher.md has {count} rows for --{name}" for name, count in rows.items() if count != 1]
    assert not wrong, "\n".join(["", *wrong])


def test_the_docs_have_no_other_rows():
    named = [line.split("`")[1].split()[0] for line in DOCS.read_text().splitlines() if line.startswith("| `--")]
    assert sorted(named) == sorted(f"--{flag.name}" for flag in FLAGS)


def test_torchruns_flags_are_all_there():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    from torch.distributed.run import get_args_parser

    theirs = {spelling for action in get_args_parser()._actions for spelling in action.option_strings}
    ours = {spelling for flag in FLAGS for spelling in flag.spellings}
    assert theirs - {"-h", "--help"} <= ours


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--module", "--no-python"], "are mutually exclusive"),
        (["--nnodes", "2"], "need a rendezvous address"),
        (["--nnodes", "2", "--master-addr", "h0"], "needs --node-rank"),
        (["--nnodes", "2", "--master-addr", "h0", "--node-rank", "2"], "0 to 1"),
        (["--nnodes", "1:2", "--master-addr", "h0"], "--rdzv-backend c10d"),
        (["--chaos", "kill:2s"], "--chaos needs --elastic"),
        (["--min-workers", "2"], "--min-workers needs --elastic"),
        (["--preload", "wave"], "--preload needs --elastic"),
        (["--elastic", "--preload", "wave", "--no-python"], "--preload needs workers that are forked"),
        (["--elastic", "--min-workers", "2"], "more than the 1 workers of this machine"),
        (["--elastic", "--nproc-per-node", "2", "--chaos", "cut:2s"], "--chaos cut needs several machines"),
        (["--elastic", "--chaos", "kill:2s"], "--chaos needs at least two workers"),
        (["--rdzv-conf", "speed=1"], "unknown settings: speed"),
        (["--nnodes=2", "--rdzv-endpoint", "h0", "--rdzv-conf", "is_host=maybe"], "--rdzv-conf is_host: 'maybe'"),
        (["--nnodes=2", "--rdzv-endpoint", "h0:\u0663"], "is not HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint", "h0:port"], "is not HOST:PORT"),
        (
            ["--nnodes=2", "--rdzv-endpoint", "h0:29400,h1:29400"],
            "contains several addresses. The rendezvous has one host",
        ),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(arguments, complaint):
    with pytest.raises(OptionError, match=complaint):
        job(*arguments)


def test_an_elastic_job_has_no_bound_unless_one_is_given():
    assert job("--max-restarts", "3").elastic is None
    assert job("--elastic").elastic == ElasticOptions(1, None, None)
    bounded = job("--elastic", "--nproc-per-node=4", "--max-restarts=3", "--min-workers=2")
    assert bounded.elastic == ElasticOptions(2, 3, None)


def test_machines_of_an_elastic_job_have_no_fixed_numbers():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "10.77.0.[1-2]"}
    for rank in range(2):
        found = job("--elastic", environment={**step, "SLURM_PROCID": str(rank)}).rendezvous
        assert (found.is_static, found.node_rank, found.serves) == (False, None, rank == 0)
    by_endpoint = job("--elastic", "--nnodes", "2:4", "--rdzv-endpoint", "h0:29400").rendezvous
    assert (by_endpoint.min_nodes, by_endpoint.max_nodes, by_endpoint.serves) == (2, 4, None)


def test_workers_by_kind(monkeypatch):
    assert parse("--nproc-per-node", "cpu").nproc_per_node == allowed_cores()
    monkeypatch.setattr("paceline.operate.launch.option_types.count_gpus", lambda: 4)
    assert [parse("--nproc-per-node", kind).nproc_per_node for kind in ("gpu", "auto")] == [4, 4]


def test_gpus_may_be_on_other_machines_only(monkeypatch):
    monkeypatch.setattr("paceline.operate.launch.option_types.count_gpus", lambda: 0)
    assert parse("--hosts", "a", "--nproc-per-node", "gpu").nproc_per_node == 0
    with pytest.raises(OptionError, match="no usable GPU on this machine"):
        job("--nproc-per-node", "gpu")


def test_machines_meet_by_number_or_in_any_order():
    by_number = job("--nnodes=2", "--node-rank=1", "--master-addr=h0", "--master-port=29400").rendezvous
    assert (by_number.address, by_number.is_static, by_number.serves) == (("h0", 29400), True, False)
    as_they_come = job("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd77::1]:29401").rendezvous
    assert (as_they_come.address, as_they_come.is_static, as_they_come.serves) == (("fd77::1", 29401), False, None)
    conf = "is_host=0,join_timeout=5,last_call_timeout=2,heartbeat_timeout=1.5"
    told = job("--nnodes=2", "--rdzv-endpoint=h0", "--rdzv-conf", conf).rendezvous
    assert (told.serves, told.join_timeout_s, told.last_call_s, told.silence_s) == (False, 5.0, 2.0, 1.5)
    assert told.address == ("h0", 29500)
    assert job("--standalone", "--nnodes=2").rendezvous.address is None
    assert job("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0").rendezvous.address is None
    assert endpoint_of("10.0.0.1:1234") == ("10.0.0.1", 1234)


def test_kubeflow_needs_no_flags():
    kubeflow = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "3",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }
    found = job(environment=kubeflow)
    assert (found.workers, found.rendezvous.max_nodes, found.rendezvous.node_rank) == (3, 2, 0)
    assert found.rendezvous.address == ("job-node-0-0.job", 29500)


def test_the_kind_of_command():
    kinds = [job(*flags).command.kind for flags in ([], ["-m"], ["--no-python"], ["--run-path"])]
    assert kinds == [CommandKind.SCRIPT, CommandKind.MODULE, CommandKind.PROGRAM, CommandKind.PATH]


def test_forks_have_two_names():
    cases = ([], ["--start-method=spawn"], ["--start-method=fork"], ["--start-method=forkserver"])
    assert [job(*flags).start_method for flags in cases] == ["auto", "spawn", "fork", "fork"]


def test_the_flag_for_the_time_to_end_precedes_the_variable():
    assert job().shutdown_timeout_s == 30.0
    assert job(environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"}).shutdown_timeout_s == 12.0
    assert job("--shutdown-timeout=3").shutdown_timeout_s == 3.0
    with pytest.raises(OptionError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'soon' is not a number of seconds"):
        job(environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"})


def test_a_log_directory_asks_for_logs():
    assert streams_of(job("--log-dir=d").output.tee, 5) is Streams.BOTH
    assert not streams_of(job("--log-dir=d", "--redirects=1").output.tee, 0)
    assert streams_of({0: Streams.OUT}, 1) is Streams.NONE


def test_a_template_says_what_stands_before_each_line(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert job().output.line_prefix == ""
    template = "${hostname}:${role_name}:${rank}:${local_rank} $1 "
    assert job("--role=eval", f"--log-line-prefix-template={template}").output.line_prefix == (
        "node7:eval:${rank}:${local_rank} $1 "
    )
    torchruns = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}> "}
    assert job(environment=torchruns).output.line_prefix == "${rank}> "
    assert job("--log_line_prefix_template=x", environment=torchruns).output.line_prefix == "x"


def test_cores_are_bound_unless_told_otherwise():
    assert [job(*flags).binding for flags in ([], ["--no-pin"], ["--numa-binding=node"])] == ["exclusive", None, "node"]


COMPLETE_IN_BASH = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_paceline; printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: completion_script(shell, parser({})) for shell in SHELLS}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["mig"], ["migrate"]),
        (["run", "--nproc"], ["--nproc-per-node"]),
        (["run", "--start-method", "fork"], ["fork", "forkserver"]),
        (["run", "--nproc-per-node", "2", "tra"], ["train.py"]),
        (["run", "train.py", "da"], ["data.csv"]),
        (["checkpoint", "exp"], ["export"]),
        (["checkpoint", "export", "--o"], ["--only"]),
        (["migrate", "--way", "pl"], ["plugin"]),
        (["completion", "f"], ["fish"]),
    ],
)
def test_bash_offers_commands_flags_choices_and_files(words, offered, scripts, tmp_path):
    for name in ("train.py", "data.csv"):
        (tmp_path / name).touch()
    done = subprocess.run(
        ["bash", "-c", scripts["bash"] + COMPLETE_IN_BASH, "bash", "paceline", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_valid_in_its_shell(shell, scripts, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell])
    subprocess.run([shell, "-n", str(tmp_path / "script")], timeout=60, check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_contains_every_command_and_its_flags(shell, scripts):
    for word in ("launch-script", "checkpoint", "inspect", "nproc-per-node", "stall-after"):
        assert word in scripts[shell]
    assert "--nproc_per_node" not in scripts[shell]


def test_the_command_and_the_flag_of_torchrun_print_the_same(capsys):
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    for spelling in ("--print-completion", "--print_completion"):
        with pytest.raises(SystemExit) as ended:
            main(["run", spelling, "fish"])
        assert (ended.value.code, capsys.readouterr().out) == (0, script)


def test_a_missing_shtab_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    message = "shtab, which generates the script, is not installed: pip install shtab\n"
    assert capsys.readouterr().err == f"paceline completion: {message}"
    with pytest.raises(SystemExit):
        main(["run", "--print-completion", "bash"])
    assert capsys.readouterr().err.startswith(f"paceline run: --print-completion: {message}")


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "ksh"])
    error = capsys.readouterr().err
    assert "'ksh'" in error and all(shell in error for shell in SHELLS)


def test_other_commands_do_not_import_shtab():
    code = (
        "import sys; from paceline.cli.main import main; main(['runs', '/nowhere']); sys.exit('shtab' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd="/", stderr=subprocess.DEVNULL, timeout=60, check=True)
