"""Pipeline parallelism: each rank of a group has some of a model's stages, and micro-batches pass through them.

May use: `group` and below. The schedule is data: `plan.py` defines it, `schedules.py` makes those of the literature,
`program.py` adds the messages between ranks, `proof.py` shows that a program is right and cannot hang, and
`simulation.py` says how long it takes. None of these imports torch. Start reading at `module.py`: `Pipeline` carries a
program out, with `stage.py` for the computation of one stage and `transfer.py` for the messages.
"""
