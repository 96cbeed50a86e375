"""The merger's pure core: completions of open groups in, prefix trees out."""
