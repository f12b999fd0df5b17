"""`paceline top`: a running job in the terminal.

`finding.py` finds the page of a job, `client.py` asks it for pictures, `lines.py` turns a picture into lines of text,
and `screen.py` shows them: redrawn in place, or with Textual where that is installed. May use `observe.live` and the
standard library. Start reading at `command.py`.
"""
