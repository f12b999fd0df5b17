"""The live page, `paceline top` and `paceline report`: one picture of the job, drawn in three places.

A `Sample` says what is new since the last one, a `Board` keeps what is worth showing, and a `Picture` is what a
viewer sees: `sample.py`, `board.py` and `picture.py` know neither files nor sockets nor a clock. `server.py` serves
the page, behind the rules of `guard.py`; what runs in the browser is in `static/`. May use `observe`'s reading of
recordings and the standard library, and Starlette and uvicorn in `server.py` alone, which is imported only with
`paceline run --dash`. Start reading at `picture.py`, then `board.py`.
"""
