"""Public modules by the names of `torch.nn.parallel`, and the communication hooks.

May use: `train`. Start reading at `paceline/train/data_parallel.py` and `paceline/train/ddp/hooks.py`.
"""
