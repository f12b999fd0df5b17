"""`paceline top`: a running job in the terminal.

`finding.py` finds a job, `looking.py` takes pictures of it, from its page by way of `client.py` or from its recordings,
`lines.py` turns a picture into lines of text, and `screen.py` shows them: redrawn in place, or with Textual where that
is installed. May use `observe.live` and the standard library. Start reading at `command.py`.
"""
