"""What the records of a run add up to: its live state, its trajectories and its audit.

Pure but for `reading`: records in, values out. Records of different topics may come in any order
(a reader interleaves partitions as it likes), so nothing here depends on the order between topics.
"""
