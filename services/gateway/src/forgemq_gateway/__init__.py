"""The only door for agents: HTTP, tokenisation, episodes and their token trees."""
