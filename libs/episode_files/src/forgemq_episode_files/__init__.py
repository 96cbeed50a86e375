"""Played episodes as Parquet files, one row each: what `forgemq export` writes and import reads."""
