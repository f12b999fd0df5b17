"""Elastic training: workers join, leave and fail while the others continue, without restarts and without lost steps.

May use: `diloco`, `logical_shards`, `shared_model`, `zero`, `ddp`, `data` and below. `protocol.py` and `coordinator/`
do not use torch, sockets or clocks, so the launcher can run them. `worker/` and `state_transfer/` both use
`agreement.py`, `launcher_connection.py` and `training_state.py`. Start reading at `worker/elastic_state.py`.
"""
