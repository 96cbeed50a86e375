"""Ordered, partitioned logs: the Kafka one and the one in memory; and the blob store."""
