"""Runs functions on several processes, as `horovod.runner` does."""

from paceline.interop.horovod.basics import run

__all__ = ["run"]
