"""The engine over torch's gloo library, which needs nothing of torch.distributed's groups.

May use: the files of `engine` itself, `engine/adapters`, `store`, `_core`. Start reading at `engine.py`; `channel.py`
runs collectives, `messages.py` sends and receives, and `wire.py` carries the schedules for what gloo lacks.
"""
