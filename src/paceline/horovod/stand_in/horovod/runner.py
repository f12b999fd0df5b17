"""Runs functions on several processes, as `horovod.runner` does."""

from paceline.horovod.running import run

__all__ = ["run"]
