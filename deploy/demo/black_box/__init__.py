"""The shop desk served by a third-party agent: the OpenAI Agents SDK, unmodified."""
