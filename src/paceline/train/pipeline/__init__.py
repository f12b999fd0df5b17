"""Pipeline parallelism: each rank of a group has some of a model's stages, and micro-batches pass through them.

May use: `paceline.comm` and `train/training_events.py`. Start reading at `pipeline.py`: `Pipeline` runs a program, with
`stage.py` for the computation of one stage and `execution.py` for a batch and its messages. The schedule is data:
`schedule.py` has the schedules of the literature, and `program.py` adds the messages between ranks, verifies that a
program is correct and cannot hang, and simulates it. Neither imports torch.
"""
