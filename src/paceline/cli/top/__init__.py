"""`paceline top`: a running job in the terminal.

`text_view.py` shows the job as lines of text, and `app.py` with Textual where that is installed.

May use: `dashboard`, `diagnosis` and the standard library. Start reading at `client.py`, which finds a job and fetches
its state.
"""
