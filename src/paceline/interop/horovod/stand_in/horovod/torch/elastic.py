"""A placeholder for Horovod's elastic training. Importing it raises an error, because Paceline's interface differs."""

import paceline.interop.horovod

raise ImportError(f"horovod.torch.elastic: {paceline.interop.horovod.ABSENT['elastic']}")
