"""Runs the chunks of a sweep, or batches, in this thread, in other threads, in processes, or on a cluster.

`scheduling` runs chunks of cells in this thread and keeps results in a ledger, which shows the progress and writes the
`checkpoint`: a file from which the same call resumes. `dispatch` submits cells or batches to an executor instead, and
submits them again if a worker is lost; `clusters` adds support for Dask and Ray. `pickling` converts tasks to bytes,
without weights. `worker` runs a task in another process or thread, and checks that the graph there has the same
model. `mapping` runs a function of each batch of a dataset.
"""
