"""The job's secret: where it comes from and the keys derived from it.

May use: `errors`, `descriptors`. Start reading at `secret.py`.
"""
