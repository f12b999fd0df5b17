"""What `--elastic`, `--min-workers`, `--preload` and `--chaos` ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from paceline.launch.elastic.chaos import Chaos
from paceline.launch.values import OptionError


@dataclass(frozen=True)
class ElasticOptions:
    """How the workers of an elastic job are kept running.

    Attributes:
        min_workers: with fewer workers the others wait.
        most_replacements: how many workers this machine replaces; None if there is no bound.
        chaos: what is done to random workers.
        preload: modules that are imported before workers are forked.
    """

    min_workers: int = 1
    most_replacements: int | None = None
    chaos: Chaos | None = None
    preload: tuple[str, ...] = ()


def elastic_of(options: argparse.Namespace, workers: int, has_several_machines: bool) -> ElasticOptions | None:
    """Returns what the flags ask for; None if the job is not elastic.

    Raises:
        OptionError: flags contradict each other.
    """
    if not options.elastic:
        if options.chaos is not None:
            raise OptionError(
                "--chaos needs --elastic: without it a worker that is killed ends the job, or restarts all of them"
            )
        if options.min_workers is not None:
            raise OptionError("--min-workers needs --elastic: without it a job runs with all of its workers or none")
        if options.preload:
            raise OptionError("--preload needs --elastic: it makes the workers that take others' places start sooner")
        return None
    if options.preload and (options.no_python or options.start_method == "spawn"):
        raise OptionError(
            "--preload needs workers that are forked; leave out --start-method spawn and --no-python, with which each "
            "is a program of its own"
        )
    least = 1 if options.min_workers is None else options.min_workers
    if least > workers and not has_several_machines:
        raise OptionError(
            f"--min-workers {least} is more than the {workers} workers of this machine; set --nproc-per-node too"
        )
    if options.chaos is not None and not has_several_machines:
        _check_chaos(options.chaos, workers)
    return ElasticOptions(least, options.max_restarts, options.chaos, options.preload)


def _check_chaos(chaos: Chaos, workers: int) -> None:
    """Refuses what chaos cannot do to the workers of a single machine."""
    if chaos.cuts:
        raise OptionError(
            "--chaos cut needs several machines: the workers of one exchange data through its memory, where there is "
            "no line to cut"
        )
    if workers == 1:
        raise OptionError(
            "--chaos needs two workers or more on a machine, since it spares the last: without it the job's state "
            "would be lost; set --nproc-per-node"
        )
