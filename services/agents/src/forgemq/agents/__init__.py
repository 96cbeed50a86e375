"""The agent side: task sources, the white-box loop, launchers for black-box agents."""
