"""Refuses the import of Horovod's elastic training, which has another form here."""

import paceline.interop.horovod

raise ImportError(f"horovod.torch.elastic: {paceline.interop.horovod.ABSENT['elastic']}")
