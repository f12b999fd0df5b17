"""Samplers: which rank reads which sample.

May use: `group` and below. Start reading at `sampler.py`.
"""
