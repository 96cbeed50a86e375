"""Whether a run kept its guarantees, from its records alone.

`guarantees` decides, `tree_facts` and `group_records` find the facts: all pure. `group_index` and
`unaudited` read the records of whole partitions in bounded pieces.
"""
