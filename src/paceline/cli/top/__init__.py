"""`paceline top`: a running job in the terminal.

`text_view.py` shows the job as lines of text, and `app.py` shows it with Textual if that is installed.

May use: `dashboard`, `diagnosis` and the standard library. Start reading at `client.py`, which finds a job and fetches
its state.
"""
