"""Every record that crosses a service boundary, and the topics that carry them."""
