"""Rewrites programs of torch.distributed and Horovod, and the files that launch them, so that they use Paceline.

May use: nothing of Paceline but its list of public names; never torch. `names.py` says what each name becomes,
`survey.py` which of two ways a program takes, `python_files.py` and `commands.py` rewrite a text, `project.py` finds
the files. Everything but `project.py` is functions from text to text. LibCST (the extra `paceline[migrate]`) keeps what
is not rewritten as it was. Start reading at `names.py`.
"""
