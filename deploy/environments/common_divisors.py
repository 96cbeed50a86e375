"""Greatest common divisors of reasoning-gym, in the environment that verifiers has for it.

It needs `reasoning-gym`, as `chain_sums.py` does.
"""

import verifiers as vf


def load_environment(tasks: int = 1000, held_out: int = 100, seed: int = 0) -> vf.Environment:
    """The environment with so many tasks to train on, and so many held out."""
    return vf.ReasoningGymEnv(
        "gcd", num_train_examples=tasks, num_eval_examples=held_out, seed=seed
    )
