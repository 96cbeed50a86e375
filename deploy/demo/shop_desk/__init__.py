"""Shop desk: the demo's task, environment, agent, rewards and base model, as a user writes them."""
