"""Elastic training: workers join, leave and fail while the others continue, without restarts and without lost steps.

May use: `diloco`, `logical_shards`, `shared_model`, `zero`, `ddp`, `data` and below. `protocol.py` and `coordinator/`
use no torch, sockets or clocks, so the launcher can run them. Start reading at `worker/elastic_state.py`.
"""
