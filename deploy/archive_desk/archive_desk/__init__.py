"""The archive desk: a domain whose tasks need three times what the context holds."""
