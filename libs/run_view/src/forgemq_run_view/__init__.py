"""What the records of a run add up to: its live state, its trajectories and its report.

Pure: records in, values out. A reader interleaves partitions as it likes, so nothing here depends
on the order between records of different topics.
"""
