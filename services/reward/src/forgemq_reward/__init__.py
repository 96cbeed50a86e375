"""Grades episodes and turns a complete group into returns and advantages."""
