"""Elastic training: workers join, leave and fail while the others continue, without restarts and without lost steps.

May use: `diloco`, `logical_shards`, `shared_model`, `zero`, `ddp`, `data` and below. `protocol.py` and `coordinator/`
are free of torch, sockets and clocks, so that the launcher can run them. Start reading at `worker/elastic_state.py`.
"""
