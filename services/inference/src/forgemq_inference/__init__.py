"""One process beside one SGLang server."""
