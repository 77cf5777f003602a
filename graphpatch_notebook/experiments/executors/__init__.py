"""Where the cells of a sweep run: in this thread, in other threads, in processes, or on a cluster.

`scheduling` runs chunks here and keeps results in a ledger, which shows the progress and writes the `checkpoint`: the
file from which the same call goes on. `executors` submits chunks instead, and submits them again where a worker is
lost. `pickling` makes bytes of what is sent, without weights; `worker` runs it in another process or thread, on a graph
that is built there and is checked to be the same model.
"""
