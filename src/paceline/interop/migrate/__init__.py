"""`paceline migrate`: rewrites programs that use torch.distributed or Horovod, and the scripts that launch them.

`names.py` maps names, `python_files.py` and `commands.py` rewrite text, and `project.py` reads and writes files; no
other module accesses files. LibCST (the extra `paceline[migrate]`) preserves the formatting of unchanged code.

May use: only Paceline's list of public names; never torch. Start reading at `names.py`.
"""
