"""Messages to token ids and back, over renderers."""
