"""Values of flags, and error messages about wrong values."""

from __future__ import annotations

import pytest

from paceline.cli.main import parser


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
