"""Data that does not fit into memory: what models compute on datasets, read batch by batch.

`batches` reads datasets, and finds the example and the position of each row of a value. `store` writes values to files
and reads them back, `batches` computes means of values and of results, and `probes` fits linear probes.
"""
