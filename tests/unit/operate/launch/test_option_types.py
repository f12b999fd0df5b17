"""Flag values, and error messages about invalid ones."""

from __future__ import annotations

import pytest

from paceline.cli.main import parser
from paceline.operate.launch.flags import FLAGS


def parse(*arguments: str, environment: dict[str, str] | None = None):
    return parser(environment or {}).parse_args(["run", *arguments, "x.py"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--elastic", "--preload", "a,b-c"], "'b-c' is not the name of a module"),
        (["--nnodes", "3:2"], "MIN at most MAX"),
        (["--nproc-per-node", "many"], "neither a number of at least 1 nor auto"),
        (["--rdzv-backend", "etcd"], "etcd is not needed"),
        (["--redirects", "4"], "neither 0 (none)"),
        (["--tee", "0:x"], "neither 0 (none)"),
        (["--master-port", "99999"], "not a port"),
        (["--signals-to-handle", "SIGKILL"], "not a signal that can be handled"),
        (["--logs-specs", "mine"], "use --log-dir, --tee"),
        (["--local-ranks-filter", "a"], "not a list of local ranks"),
        (["--rdzv-conf", "x"], "is not KEY=VALUE"),
        (["--monitor-interval", "soon"], "not a number of seconds"),
        (["--stdin", "first"], "neither a rank nor none"),
        (["--start-method", "thread"], "invalid choice"),
        (["--min-workers", "0"], "not a number of at least 1"),
        (["--chaos", "maim:2s"], "neither KIND:SECONDS"),
        (["--export", "a b"], "neither NAME nor NAME=VALUE"),
    ],
)
def test_what_is_wrong_with_a_value_is_said(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("nnodes", "x", "'x' is neither a number of at least 1 nor MIN:MAX"),
        ("start-method", "x", "'x' is not one of auto, spawn, fork, forkserver"),
        ("start-method", "", "'' is not one of auto, spawn, fork, forkserver"),
        ("event-log-handler", "x", "'x' is not one of null, console"),
        ("standalone", "maybe", "'maybe' is neither 1 (on) nor 0 (off)"),
        ("no-pin", "on", "'on' is neither 1 (on) nor 0 (off)"),
    ],
)
def test_what_is_wrong_with_the_value_of_a_variable_is_said(flag, value, complaint, capsys):
    name = f"PET_{flag.replace('-', '_').upper()}"
    with pytest.raises(SystemExit) as end:
        parse(environment={name: value})
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert f"--{flag}" in said and complaint in said and f"the environment variable {name}" in said


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.variable and not flag.choices], ids=lambda it: it.name)
def test_a_variable_is_checked_like_its_flag(flag):
    """The values are not valid as a number, list or name; a flag that accepts any text accepts them in both forms."""
    for value in ("\u0663", "x y", "-1"):
        by_variable = outcome({f"PET_{flag.dest.upper()}": value})
        assert by_variable == (None if flag.parse is None else outcome({}, f"--{flag.name}={value}")), value


def outcome(environment: dict[str, str], *arguments: str) -> dict[str, object] | None:
    try:
        return vars(parse(*arguments, environment=environment))
    except SystemExit:
        return None


@pytest.mark.parametrize(("value", "meaning"), [("1", True), ("2", True), ("true", True), ("0", False), ("", False)])
def test_a_switch_is_a_number_or_a_word(value, meaning):
    assert parse(environment={"PET_STANDALONE": value}).standalone is meaning


@pytest.mark.parametrize("flag", ["nnodes", "nproc-per-node", "node-rank", "min-workers", "port", "stdin", "tee"])
@pytest.mark.parametrize("value", ["\u0663", "\u00b2", "9" * 5000])
def test_a_number_consists_of_ascii_digits(flag, value, capsys):
    with pytest.raises(SystemExit):
        parse(f"--{flag}={value}")
    assert "invalid" not in (said := capsys.readouterr().err) and " is n" in said
