"""Pipeline parallelism: each rank in a group holds some of a model's stages, through which micro-batches pass.

May use: `paceline.comm` and `train/training_events.py`. Start reading at `pipeline.py`, whose class `Pipeline` runs a
program. `execution.py` implements the computation of one stage and the execution of one batch, including its messages.
Schedules are data. `program.py` creates schedules from the literature, adds the messages between ranks, verifies that a
program is correct and cannot hang, and simulates schedules; it does not import torch.
"""
