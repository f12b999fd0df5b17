"""`paceline top`: displays a running job in the terminal.

`text_view.py` displays the job as plain text; `app.py` displays it with Textual if that is installed.

May use: `dashboard`, `diagnosis` and the standard library. Start reading at `client.py`, which locates a job and
fetches its state.
"""
