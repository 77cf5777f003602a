"""Results: the labeled arrays that experiments return (`arrays`), and files of them (`files`).

`data_array` puts the metrics of all cells into an `xarray.DataArray`, with the values of the axes as coordinates, and
baseline, errors and remarks as attributes. `save_result` writes it to a Parquet or JSON file, `load_result` reads it.
"""
