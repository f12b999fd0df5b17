"""Job dashboard: the live page, and the state that `paceline top` and `paceline report` also display.

A collector (`local_collector.py`, `external_collector.py`) takes a `JobSample`, which contains everything new since the
previous one. The aggregator converts samples into a `DashboardState`; it does not use files, sockets or a clock.
`server.py` serves the page subject to the rules in `access.py`; the browser code is in `static/`.

May use: `operate.diagnosis`, `comm.record` and `comm.security`. Only `application.py`, which only `paceline run --dash`
imports, may use Starlette and uvicorn. Start reading at `dashboard_state.py`, then `aggregator.py`.
"""
