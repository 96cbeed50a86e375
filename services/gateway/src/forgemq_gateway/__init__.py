"""The only HTTP entry for agents: requests to tokens, episodes and their token trees."""
