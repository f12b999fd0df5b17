"""Horovod's elastic training, whose import raises an error, since Paceline's has another interface."""

import paceline.interop.horovod

raise ImportError(f"horovod.torch.elastic: {paceline.interop.horovod.ABSENT['elastic']}")
