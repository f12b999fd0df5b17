"""Job operations: the launcher, diagnosis of hangs and failures, the dashboard, and predictions for other machines.

May use: `train` and `comm`. `launch/` starts and monitors workers, `diagnosis/` analyzes their recordings, `dashboard/`
displays the running job, and `plan/` predicts a job's time and cost. Start reading at `launch/`.
"""
