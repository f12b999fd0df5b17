"""`paceline migrate`: rewrites programs that use torch.distributed or Horovod, and the files that launch them.

`names.py` maps names, `python_files.py` and `commands.py` rewrite texts, and `project.py` finds and writes the files;
all others are functions from text to text. LibCST (the extra `paceline[migrate]`) preserves everything that is not
rewritten.

May use: nothing of Paceline except its list of public names; never torch. Start reading at `names.py`.
"""
