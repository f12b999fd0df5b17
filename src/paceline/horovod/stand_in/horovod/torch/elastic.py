"""Refuses the import of Horovod's elastic training, which has another form here."""

import paceline.horovod

raise ImportError(f"horovod.torch.elastic: {paceline.horovod.ABSENT['elastic']}")
