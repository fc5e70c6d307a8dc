"""Knowledge of who is alive: a dead rank brings all down, and a collective that times out names its missing ranks.

Rank 0 runs a small server in a thread (`server`), every rank a client in another (`member`). A process that ends
without a goodbye has died: its kernel closes the connection, so that no heartbeats are needed and a busy rank is never
taken for a dead one. `verdicts` decides which failure came first and in which order processes end, so that its
traceback is the last on the screen. `exits` recognises an end by `sys.exit` with a failure's code. How far each rank
has come, which is what a timeout asks for, is recorded in `booster_core.ranks.progress`.
"""

from booster_runtime.liveness.member import Monitor, start_monitor

__all__ = ["Monitor", "start_monitor"]
