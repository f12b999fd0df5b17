"""The engine over torch's gloo library.

May use: `engine/api.py`, `engine/adapters`, `schedule`, `store`. Start reading at `engine.py`.
"""
