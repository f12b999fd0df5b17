"""Dashboard of a job: the live page, and the state that `paceline top` and `paceline report` also draw.

A collector (`local_collector.py`, `external_collector.py`, `directory_collector.py`) takes a `JobSample`, which
contains everything new since the previous one. The aggregator turns samples into a `DashboardState`; it uses no files,
sockets or clock. `server.py` serves the page under the rules of `access.py`; the browser's part is in `static/`.

May use: `operate.diagnosis`, `comm.record`, `comm.security`, and Starlette and uvicorn in `application.py` alone, which
only `paceline run --dash` imports. Start reading at `dashboard_state.py`, then `aggregator.py`.
"""
