"""Data parallel modules: replicas that stay in step.

May use: `group` and below. Start reading at `ddp/module.py`.
"""
