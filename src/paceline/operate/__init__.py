"""Operation of a job: the launcher, diagnosis of hangs and failures, the dashboard, and plans for other machines.

May use: `train` and `comm`. `launch/` starts and watches workers, `diagnosis/` explains what they recorded,
`dashboard/` shows it while the job runs, and `plan/` predicts a job's time and cost. Start reading at `launch/`.
"""
