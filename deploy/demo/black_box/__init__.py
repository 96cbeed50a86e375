"""The shop desk served by an agent we did not write: the OpenAI Agents SDK, unmodified."""
