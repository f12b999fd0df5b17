"""Job dashboard: the live page, and the state that `paceline top` and `paceline report` also display.

A collector (`local_collector.py`, `external_collector.py`) takes a `JobSample`, which contains the data recorded since
the previous sample. The aggregator converts samples into a `DashboardState` without using files, sockets or a clock.
`server.py` serves the page subject to the rules in `access.py`; the browser code is in `static/`.

May use: `operate.diagnosis`, `comm.record` and `comm.security`. Only `application.py` may use Starlette and uvicorn,
and only `paceline run --dash` imports it. Start reading at `dashboard_state.py`, then `aggregator.py`.
"""
