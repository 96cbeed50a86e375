"""Agents and rewards of the recipes: mathematics in one turn, and coding with mini-swe-agent."""
